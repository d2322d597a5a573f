"""`vllm-consistent demo`: arguments in, exit code out."""

from __future__ import annotations

import datetime
import json
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

from consistent_kernels.errors import ConsistencyError
from vllm_consistent.cli import exit_codes
from vllm_consistent.cli.demo.errors import RunError
from vllm_consistent.cli.demo.options import BUNDLED_MODEL, DemoOptions, merge_for_resume
from vllm_consistent.cli.interrupts import interruptible

RUNS = Path("runs")
_DEFAULT = DemoOptions()


def demo(
    ctx: typer.Context,
    steps: Annotated[
        int, typer.Option(help="Optimizer steps in all, those before a --resume included.")
    ] = _DEFAULT.steps,
    prompts: Annotated[int, typer.Option(help="Prompts per step.")] = _DEFAULT.prompts,
    samples: Annotated[
        int, typer.Option(help="Samples per prompt: the GRPO group, two or more.")
    ] = _DEFAULT.samples,
    max_tokens: Annotated[
        int, typer.Option(help="Longest response, in tokens.")
    ] = _DEFAULT.max_tokens,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature, applied by engine and trainer alike.")
    ] = _DEFAULT.temperature,
    model: Annotated[
        str,
        typer.Option(
            metavar="FOLDER",
            help="A Hugging Face folder (Llama, Qwen2, Qwen3; bf16), or the bundled model.",
        ),
    ] = BUNDLED_MODEL,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='JSONL of {"prompt": text or chat messages, "answer": integer or text}. '
            "An integer is graded against the last number of the response, a text against its "
            "last line. Default: sums of two one-digit numbers.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Where report.html, metrics.jsonl, summary.json and checkpoints go. Default: a "
            "new folder runs/demo-<time>; with --resume, the newest of them.",
        ),
    ] = None,
    json_: Annotated[
        bool, typer.Option("--json", help="Print the final summary as JSON on stdout.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Fixes problems and samples.")] = _DEFAULT.seed,
    no_baseline: Annotated[
        bool, typer.Option("--no-baseline", help="Leave out the stock pair.")
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue from the last checkpoint in --out; other options keep their values, "
            "--steps may grow.",
        ),
    ] = False,
) -> None:
    """Run GRPO on a real model and check every log-prob bit for bit.

    Each step, the live vLLM engine samples with log-probs, the trainer (a Hugging Face model on the
    engine's kernels) scores the same token ids, and the two numbers of every token are compared as
    fp32 bit patterns. Then one optimizer step (AdamW on fp32 masters, PPO clip, group-normalised
    advantages), and the new weights go into the running engine in place, which proves by digest
    that it has them. Beside it, stock vLLM and a stock forward show the usual mismatch on the same
    prompts.

    Exit codes: 0 every token bit-equal; 1 a mismatch, named by step, sample, position and bit
    patterns; 2 an argument, input file, folder or checkpoint cannot be used; 3 the run could not go
    on (engine, disk, gradient); 130 interrupted. Whatever the code, finished steps are kept.

    Example: vllm-consistent demo --steps 2 --out runs/first, then
    vllm-consistent demo --resume --steps 4 --out runs/first
    """
    options = DemoOptions(
        steps=steps,
        prompts=prompts,
        samples=samples,
        max_tokens=max_tokens,
        temperature=temperature,
        model=model,
        data=data,
        out=out or default_out(resume),
        seed=seed,
        baseline=not no_baseline,
        resume=resume,
    )
    try:
        with interruptible():
            code = _run(options, _explicit(ctx), as_json=json_)
    except ConsistencyError as error:
        typer.echo(f"error: {error}", err=True)
        code = exit_codes.FAILED if isinstance(error, RunError) else exit_codes.USAGE
    except KeyboardInterrupt:
        code = exit_codes.INTERRUPTED
    except Exception:
        # Python would end with 1, which means a mismatch here.
        traceback.print_exc()
        code = exit_codes.FAILED
    raise typer.Exit(code)


def _explicit(ctx: typer.Context) -> frozenset[str]:
    """Return the options that the command line really gave, by their `DemoOptions` names."""
    given = {
        name
        for name in ctx.params
        if getattr(ctx.get_parameter_source(name), "name", "") != "DEFAULT"
    }
    return frozenset("baseline" if name == "no_baseline" else name for name in given)


def default_out(resume: bool) -> Path:
    """Return a new folder named by the time, or with `resume` the newest run there is."""
    if resume:
        earlier = sorted(RUNS.glob("demo-*/run.json"))
        if earlier:
            return earlier[-1].parent
    return RUNS / f"demo-{datetime.datetime.now():%Y%m%d-%H%M%S}"


def _run(options: DemoOptions, explicit: frozenset[str], *, as_json: bool) -> int:
    # Imported here: `--help` and usage errors must not wait for torch.
    from vllm_consistent import env
    from vllm_consistent.cli.demo.data import check_same_problems, problem_source
    from vllm_consistent.cli.demo.display import Display
    from vllm_consistent.cli.demo.metrics import plain
    from vllm_consistent.cli.demo.model_source import resolve_model
    from vllm_consistent.cli.demo.output import OutputFolder, log_error, messages_to, private_copy
    from vllm_consistent.cli.demo.pair import BACKENDS
    from vllm_consistent.cli.demo.plan import make_plan
    from vllm_consistent.cli.demo.run import DemoRun, run_demo

    output = OutputFolder(options.out)
    output.check_before_start(options.resume)
    if options.resume:
        recorded = output.read_run()
        options = merge_for_resume(options, recorded["options"], explicit)
    options.check()
    problems = problem_source(options.data, options.seed)
    if options.resume:
        check_same_problems(problems.describe(), recorded.get("problems"))
    result = private_copy(sys.stdout)
    with Display(private_copy(sys.stderr), None if as_json else result) as display:
        source = resolve_model(options.model, env.cache_home() / "models", display.stage)
        display.stage("Drawing the problems")
        plan = make_plan(options, source, problems)
        output.open(sum(file.stat().st_size for file in source.path.glob("*.safetensors")))
        try:
            record = {"options": options.to_dict(), "problems": problems.describe()}
            output.write_json(output.run, record)
            with messages_to(output.engine_log):
                run = DemoRun(plan, problems.describe(), output, display)
                code, summary, stopped = run_demo(run, BACKENDS)
                if stopped is not None:
                    log_error(stopped)
        finally:
            output.close()
        _show(display, run.rows, summary, stopped)
    if as_json:
        result.write(json.dumps(plain(summary), indent=1) + "\n")
        result.flush()
    return code


def _show(
    display: Any, rows: list[dict[str, Any]], summary: dict[str, Any], stopped: BaseException | None
) -> None:
    from vllm_consistent.cli.demo.report import verdict

    said = verdict(summary)
    rates = summary["throughput"]
    if rows:
        display.table(rows)
        if rates["consistent"]:
            display.speed(rates)
    display.result(f"{said['title']} {said['text']}")
    if summary["first_mismatch"]:
        display.result("First mismatch:")
        for name, value in summary["first_mismatch"].items():
            display.result(f"  {name}: {value}")
    if rates["ratio"]:
        display.result(
            f"Rollout at {rates['concurrency']} concurrent samples: {rates['consistent']:.0f} "
            f"tokens/s, stock {rates['stock']:.0f} on the same work ({rates['ratio']:.2f} x)."
        )
    for problem in summary["not_written"]:
        display.note(f"error: {problem}")
    if not summary["not_written"]:
        display.result(f"Report: {summary['files']['report']}")
    if stopped is not None:
        hint = "add --resume to continue" if rows else "run again with --resume"
        display.note(f"error: {stopped}" if str(stopped) else "interrupted")
        display.note(f"Engine messages: {Path(summary['files']['report']).parent / 'logs'}; {hint}")
