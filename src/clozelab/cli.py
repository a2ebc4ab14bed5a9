"""`clozelab <command>`. Imports nothing heavy until a command needs it.

Exit codes: 0 done; 1 some cell failed; 2 the request was refused before anything was trained; 130 interrupted;
143 terminated.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the `clozelab` command."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    if argv[:1] == ["train"]:  # everything after `train` is Hydra's
        return _guarded(lambda: _train(argv[1:]))
    parser = _parser()
    # Overrides may stand anywhere among the flags, which argparse allows for no list of positionals.
    options, rest = parser.parse_known_args(argv)
    takes_overrides = options.command in (_run, _corpus, _cost, _inspect)
    if wrong := [argument for argument in rest if argument.startswith("-") or not takes_overrides]:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    options.overrides = rest
    return _guarded(lambda: int(options.command(options)))


def _guarded(command: Callable[[], int]) -> int:
    try:
        return command()
    except ValueError as error:
        print(f"clozelab: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        number = getattr(error, "number", 2)  # the signal that has ended a sweep; Ctrl-C says nothing
        print(f"clozelab: {'interrupted' if number == 2 else 'terminated'}", file=sys.stderr)
        return 128 + int(number)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"clozelab: {where}{error.strerror or error}; make room or choose another folder", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="clozelab",
        description="Published language-model pre-training claims as controlled, checkable experiments.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    train = commands.add_parser("train", help="train one configuration (or -m for a Hydra multirun)", add_help=False)
    train.set_defaults(command=lambda options: _train([]))

    claims = commands.add_parser("claims", help="list the claims: source, arms, scales, verdict so far")
    claims.set_defaults(command=_claims)

    run = commands.add_parser(
        "run",
        help="run what is missing of a claim, then judge it",
        usage="clozelab run CLAIM [--scale SCALE] [--seeds N] [--slots N] [--runs-dir DIR] [--dry-run] [--new-plan] "
        "[KEY=VALUE ...]",
        epilog="launcher=local|joblib|submitit|ray and launcher.KEY=VALUE say where cells run. Other KEY=VALUE are "
        "Hydra overrides for every arm alike; such a run is kept and reported apart.",
    )
    run.add_argument("claim", metavar="CLAIM", help="a claim's id (see `clozelab claims`) or the path of a claim.yaml")
    run.add_argument("--scale", default="cpu", help="the size at which to run it (default: cpu)")
    run.add_argument("--seeds", type=int, metavar="N", help="only the first N seeds")
    run.add_argument("--slots", type=int, metavar="N", help="launcher.slots=N: cells at a time on this machine")
    run.add_argument("--runs-dir", type=Path, metavar="DIR", help="where runs are kept (default: ./runs)")
    run.add_argument(
        "--dry-run", action="store_true", help="show the cells, what is missing, time and cost; start nothing"
    )
    run.add_argument("--new-plan", action="store_true", help="plan anew what was planned before the claim was edited")
    run.set_defaults(command=_run)

    status = commands.add_parser(
        "status", help="what has become of the planned cells: done, running, failed, per arm x seed"
    )
    status.add_argument("claim", metavar="CLAIM", nargs="?", help="only this claim")
    status.add_argument("--watch", type=float, nargs="?", const=2.0, metavar="S", help="draw again every S seconds (2)")
    status.add_argument("--runs-dir", type=Path, metavar="DIR", help="where runs are kept (default: ./runs)")
    status.set_defaults(command=_status)

    clean = commands.add_parser(
        "clean",
        help="show, and with --yes remove, what of the run tree nobody needs",
        epilog="KIND: checkpoints (of finished cells), earlier (cells that no plan holds any more), leftovers (of "
        "killed processes); all by default. Nothing outside the run tree is touched.",
    )
    clean.add_argument("kinds", metavar="KIND", nargs="*")
    clean.add_argument("--claim", help="only this claim")
    clean.add_argument("--runs-dir", type=Path, metavar="DIR", help="where runs are kept (default: ./runs)")
    clean.add_argument("--yes", action="store_true", help="remove it")
    clean.set_defaults(command=_clean)

    verdict = commands.add_parser("verdict", help="judge a claim again from its published evidence")
    verdict.add_argument("claim", metavar="CLAIM")
    verdict.add_argument("--scale", help="the scale (default: every scale with evidence)")
    verdict.set_defaults(command=_verdict)

    publish = commands.add_parser(
        "publish", help="append a claim's records to its evidence and write its README and plot"
    )
    publish.add_argument("claim", metavar="CLAIM")
    publish.add_argument("--scale", default="cpu")
    publish.add_argument("--runs-dir", type=Path, metavar="DIR")
    publish.set_defaults(command=_publish)

    corpus = commands.add_parser(
        "corpus",
        help="documents, sentences, words, tokens and duplicates of a corpus",
        usage="clozelab corpus [KEY=VALUE ...]",
        epilog="KEY=VALUE are Hydra overrides, such as corpus=text 'corpus.paths=[notes/*.txt]'",
    )
    corpus.set_defaults(command=_corpus)

    inspect = commands.add_parser(
        "inspect",
        help="show sequences as a run would read them: what is hidden, exchanged and kept, segments, pair labels",
        usage="clozelab inspect [n=N] [--step S] [KEY=VALUE ...]",
        epilog="KEY=VALUE are Hydra overrides, such as task=mlm_sop masking=span; n=5 sequences are shown by default.",
    )
    inspect.add_argument("--step", type=int, default=0, metavar="S", help="from this batch on (default: 0)")
    inspect.set_defaults(command=_inspect)

    fill = commands.add_parser("fill", help="what a run's model puts in the place of [MASK]")
    fill.add_argument("run", metavar="RUN", type=Path, help="a run directory")
    fill.add_argument("texts", metavar="TEXT", nargs="+", help="a text with [MASK] in it")
    fill.add_argument("--top", type=int, default=5, metavar="K", help="tokens for each mask (default: 5)")
    fill.set_defaults(command=_fill)

    export = commands.add_parser("export", help="write a run as a folder that Hugging Face's classes open")
    export.add_argument("run", metavar="RUN", type=Path, help="a run directory")
    export.add_argument("directory", metavar="DIR", type=Path, help="the folder to write; it must be new or empty")
    export.set_defaults(command=_export)

    import_ = commands.add_parser("import", help="check a folder in the Hugging Face layout; show how to train from it")
    import_.add_argument("directory", metavar="DIR", type=Path, help="a folder with config.json and model.safetensors")
    import_.set_defaults(command=_import)

    cost = commands.add_parser(
        "cost",
        help="parameters, FLOPs and memory of a run or a claim, without reading data",
        usage="clozelab cost [CLAIM --scale SCALE] [--tflops X] [--json] [KEY=VALUE ...]",
        epilog="KEY=VALUE are Hydra overrides, such as model=bert_base format.max_length=512 batch_size=256",
    )
    cost.add_argument("--scale", default="cpu", help="of the claim (default: cpu)")
    cost.add_argument("--tflops", type=float, metavar="X", help="sustained speed in 10^12 FLOP/s: prints hours too")
    cost.add_argument("--json", action="store_true", help="print one JSON object")
    cost.set_defaults(command=_cost)
    return parser


def _train(overrides: list[str]) -> int:
    from clozelab.running.train import train

    return train(overrides)


def _claims(options: argparse.Namespace) -> int:
    from clozelab.claims.listing import list_claims

    print(list_claims())
    return 0


def _run(options: argparse.Namespace) -> int:
    from clozelab.running.commands import run

    slots = [] if options.slots is None else [f"launcher.slots={options.slots}"]
    return run(
        options.claim,
        options.scale,
        options.seeds,
        options.runs_dir,
        [*options.overrides, *slots],
        options.dry_run,
        options.new_plan,
    )


def _status(options: argparse.Namespace) -> int:
    from clozelab.paths import runs_dir
    from clozelab.running.status import status

    return status(options.runs_dir or runs_dir(), options.claim, options.watch)


def _clean(options: argparse.Namespace) -> int:
    from clozelab.paths import runs_dir
    from clozelab.running.cleaning import clean

    return clean(options.runs_dir or runs_dir(), options.claim, options.kinds, options.yes)


def _verdict(options: argparse.Namespace) -> int:
    from clozelab.claims.commands import verdict

    return verdict(options.claim, options.scale)


def _publish(options: argparse.Namespace) -> int:
    from clozelab.running.commands import publish

    return publish(options.claim, options.scale, options.runs_dir)


def _corpus(options: argparse.Namespace) -> int:
    from clozelab.running.commands import corpus

    return corpus(options.overrides)


def _inspect(options: argparse.Namespace) -> int:
    from clozelab.running.inspecting import inspect

    numbers = [override.removeprefix("n=") for override in options.overrides if override.startswith("n=")]
    if any(not number.isdecimal() for number in numbers):
        raise ValueError(f"n={numbers[-1]} is no number of sequences; give for example n=5")
    overrides = [override for override in options.overrides if not override.startswith("n=")]
    return inspect(overrides, int(numbers[-1]) if numbers else 5, options.step)


def _fill(options: argparse.Namespace) -> int:
    from clozelab.running.filling import fill

    return fill(options.run, options.texts, options.top)


def _export(options: argparse.Namespace) -> int:
    from clozelab.running.export import export

    return export(options.run.expanduser(), options.directory.expanduser())


def _import(options: argparse.Namespace) -> int:
    from clozelab.running.importing import show

    return show(options.directory.expanduser())


def _cost(options: argparse.Namespace) -> int:
    from clozelab.running.cost import cost

    return cost(options.overrides, options.scale, options.tflops, options.json)


if __name__ == "__main__":
    sys.exit(main())
