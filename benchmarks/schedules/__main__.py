from benchmarks.schedules.run import app

app(prog_name="python -m benchmarks.schedules")
