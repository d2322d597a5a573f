from benchmarks.train.run import app

app(prog_name="python -m benchmarks.train")
