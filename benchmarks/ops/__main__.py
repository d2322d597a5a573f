from benchmarks.ops.run import app

app(prog_name="python -m benchmarks.ops")
