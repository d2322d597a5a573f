from benchmarks.table.run import app

app(prog_name="python -m benchmarks.table")
