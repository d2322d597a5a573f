from benchmarks.rollout.run import app

app(prog_name="python -m benchmarks.rollout")
