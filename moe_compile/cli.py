"""The command `moe-compile`: in, arguments; out, text (or JSON with --json) and an exit code.

0: done. 1: it could not be done, or the demo found a fault. 2: wrong usage. A problem is one line on standard error;
--traceback shows where it came from.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

_EXAMPLES = """\
examples:
  moe-compile demo                          the main job on a small random model; no download
  moe-compile explain ./my-model            what becomes of each MoE block of a model, and why
  moe-compile explain ./my-model --json     the same, for programs
  moe-compile explain ./my-model --arch H200    planned for a GPU that isn't here
  moe-compile explain --thiek 4,2048,768,128,8 --arch sm_107    who could run such a block there
  moe-compile bench --tokens 1,16,256       the experts alone, beside other libraries and the hardware's limit
  moe-compile tune ./my-model               measure its blocks' kernels now, so that no compilation waits for it
  moe-compile cache list                    what was measured; also show, export, import, clear
  moe-compile doctor                        versions, devices and providers of this machine
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader went away (`| head`), which is no error. The exit flushes stdout once more, hence the null device.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        if arguments.traceback:
            raise
        print(f"moe-compile: error: {str(error).strip() or type(error).__name__}", file=sys.stderr)
        return 1


def _common(**how: Any) -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False, **how)
    common.add_argument("--json", action="store_true", help="print JSON instead of text")
    common.add_argument("--traceback", action="store_true", help="show the Python traceback of an error")
    return common


_FOLDER = "folder of the cache (default: moe.cache's)"
# cache: each action, and the name that it takes
_NAMED = {"metavar": "NAME", "help": "a name that list prints, or part of a spec"}
_ACTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "list": ("what was measured, a line a spec", {**_NAMED, "nargs": "?", "default": ""}),
    "show": ("the same, with every trial", _NAMED),
    "export": ("write the results to a file", {"metavar": "FILE", "help": "to write"}),
    "import": ("take in what export wrote", {"metavar": "FILE", "help": "to read"}),
    "clear": ("drop all results", {}),
}


def _parser() -> argparse.ArgumentParser:
    common = _common()
    parser = argparse.ArgumentParser(
        prog="moe-compile",
        description='torch.compile(model, backend="moe"), from the command line.',
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, text: str, example: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            parents=[common],
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=f"example: {example}",
        )
        sub.set_defaults(run=run)
        return sub

    command("demo", _demo, "compile a small random Qwen3-MoE, check it and time it", "moe-compile demo")
    explain = command(
        "explain",
        _explain,
        "say what becomes of each MoE block of a model, and why",
        "moe-compile explain ./my-model --tokens 64",
    )
    subject = explain.add_mutually_exclusive_group(required=True)
    subject.add_argument(
        "model", metavar="MODEL", nargs="?", help="a folder of a HuggingFace model (config.json is enough), or a hub id"
    )
    subject.add_argument(
        "--thiek", metavar="T,H,I,E,K", help="instead of a model, a block of these sizes: who could run it, how fast"
    )
    explain.add_argument(
        "--arch", metavar="ARCH", help="plan for this device (H200) or architecture (sm_107) instead; --thiek: sm_90"
    )
    explain.add_argument(
        "--device", metavar="DEVICE", help="where to run the model: cpu, cuda:1 (default: CUDA, if any)"
    )
    explain.add_argument("--tokens", type=_positive, default=16, metavar="N", help="tokens in the run (default 16)")
    prices = explain.add_mutually_exclusive_group()
    prices.add_argument(
        "--crossovers", action="store_true", help="the token counts from which another kernel is cheaper, and why"
    )
    prices.add_argument("--formulas", action="store_true", help="with --thiek: how the best price is computed")
    bench = command(
        "bench",
        _bench,
        "time the experts of published geometries beside other libraries and the hardware's limit",
        "moe-compile bench --geometry qwen3_30b,mixtral --tokens 1,16,256 --json",
    )
    bench.add_argument("--geometry", default="", metavar="NAMES", help="commas between (default all; tiny on a CPU)")
    bench.add_argument("--tokens", type=_counts, metavar="N,N", help="token counts (default 1, 2, 4 ... 8192)")
    bench.add_argument("--tactics", type=_positive, metavar="N", help="N tactics of each provider, no peers")
    bench.add_argument("--only", default="", metavar="NAMES", help="columns that start with one of these")
    bench.add_argument("--rounds", type=_positive, default=15, metavar="N", help="interleaved rounds (default 15)")
    bench.add_argument("--seconds", type=_positive, metavar="N", help="start no new cell after this")
    bench.add_argument(
        "--read",
        nargs="+",
        metavar="FILE",
        help="what --json printed: how it and records beside it stand; nothing is run",
    )
    tune = command(
        "tune",
        _tune,
        "measure which kernels are fastest for a model's blocks, into the tuning cache",
        "moe-compile tune ./my-model --launch graph",
    )
    tune.add_argument("model", metavar="MODEL", help="a folder of a HuggingFace model with its weights, or a hub id")
    tune.add_argument("--tokens", type=_positive, default=512, metavar="N", help="tokens in a run (default 512)")
    tune.add_argument("--launch", choices=("graph", "eager"), help="how calls will be launched (default graph on CUDA)")
    tune.add_argument("--seconds", type=float, default=20.0, metavar="S", help="budget of a distinct spec (default 20)")
    cache = command("cache", _cache, "see and move what tuning measured", "moe-compile cache export tuned.jsonl")
    cache.set_defaults(what="")
    again = _common(argument_default=argparse.SUPPRESS)  # options count on either side of an action
    tune.add_argument("--cache", default="", metavar="FOLDER", help=_FOLDER)
    cache.add_argument("--cache", default="", metavar="FOLDER", help=_FOLDER)
    again.add_argument("--cache", metavar="FOLDER", help=_FOLDER)
    actions = cache.add_subparsers(required=True, dest="action", metavar="ACTION")
    for name, (text, what) in _ACTIONS.items():
        action = actions.add_parser(name, parents=[again], help=text)
        if what:
            action.add_argument("what", **what)
    calibrate = command(
        "calibrate",
        _calibrate,
        "fit the cost model's constants to measured tactics (bench --tactics --json), and say how well prices choose",
        "moe-compile calibrate docs/measured/offers_h200.json --write",
    )
    calibrate.add_argument("files", nargs="+", metavar="FILE", help="measurements of one device")
    calibrate.add_argument(
        "--held-out", action="append", default=[], metavar="FILE", help="tried, but not fitted to; once for each file"
    )
    calibrate.add_argument("--write", action="store_true", help="into the package's calibration.json")
    command("doctor", _doctor, "show versions, devices and which providers can run here", "moe-compile doctor --json")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _show(arguments: argparse.Namespace, result: Any) -> None:
    print(
        json.dumps(result.as_dict() if hasattr(result, "as_dict") else result, indent=2) if arguments.json else result
    )


def _demo(arguments: argparse.Namespace) -> int:
    from . import demo

    result = demo.run(say=lambda text: print(f"... {text}", file=sys.stderr, flush=True))
    _show(arguments, result)
    return 0 if result.ok else 1


def _explain(arguments: argparse.Namespace) -> int:
    if arguments.formulas and not arguments.thiek:
        raise ValueError("--formulas is of a block: it needs --thiek T,H,I,E,K")
    if arguments.device and arguments.thiek:
        raise ValueError("--device is where a model runs; what a block is planned for is --arch")
    if arguments.thiek:
        from .outlook import outlook, thiek

        tokens, spec = thiek(arguments.thiek)
        if arguments.crossovers or arguments.formulas:
            from .crossovers import crossovers, formulas

            where = arguments.arch or "sm_90"
            found = crossovers([spec], where) if arguments.crossovers else formulas(spec, tokens, where)
            _show(arguments, "\n".join(found) if isinstance(found, list) and not arguments.json else found)
        else:
            _show(arguments, outlook(spec, tokens, arguments.arch or "sm_90"))
        return 0
    import torch

    from .explain import explain
    from .hardware import named
    from .outlook import replanned
    from .pretrained import load

    if arguments.arch:
        named(arguments.arch)  # a wrong name should not wait for the model
    model, inputs = load(arguments.model, arguments.tokens, arguments.device)
    if model.device.type == "meta" and not arguments.json:
        hint = "" if arguments.arch else "; --arch H200 plans it for a GPU"
        print(f"{arguments.model} has no weights: explained from its configuration{hint}", file=sys.stderr)
    with torch.no_grad():
        report = explain(model, **inputs)
    if arguments.crossovers:
        from .crossovers import crossovers

        _show(arguments, crossovers((r.spec.experts for r in report.regions), arguments.arch or model.device))
    else:
        _show(arguments, replanned(report, arguments.arch) if arguments.arch else report)
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    from . import calibrate

    row = calibrate.calibrate(arguments.files, arguments.held_out)
    if arguments.write:
        calibrate.write(row)
    print(json.dumps(row, indent=1))
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    from . import standing

    if arguments.read:
        print("\n".join(standing.read(Path(name)) for name in arguments.read))
        return 0
    import torch

    from . import contest, suite
    from .options import one_of

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    names = [n for n in suite.GEOMETRIES if (n == "tiny") == (device.type == "cpu")]
    names = arguments.geometry.split(",") if arguments.geometry else names
    for name in names:
        one_of("--geometry", name, tuple(suite.GEOMETRIES))
    tokens = arguments.tokens or suite.TOKENS
    until = time.time() + arguments.seconds if arguments.seconds else math.inf
    only = tuple(filter(None, arguments.only.split(",")))
    columns = contest.contenders(
        suite.GEOMETRIES[names[0]], tokens[0], device, tactics=arguments.tactics or 0, peers=not arguments.tactics
    )
    if only and not any(column.startswith(only) for column in columns):
        raise ValueError(f"--only {arguments.only}: no column of {', '.join(columns)} starts so")
    said = sys.stderr if arguments.json else sys.stdout
    done: list[contest.Cell] = []
    with torch.no_grad():
        for name in names:
            of = contest.Contest(
                name, device, tactics=arguments.tactics or 0, peers=not arguments.tactics, only=only,
                rounds=max(2, arguments.rounds),
            )  # fmt: skip
            for T in tokens:
                if time.time() > until:
                    break
                of.compile(T)
                done.append(of.cell(T))
                print(done[-1], file=said, flush=True)
            del of  # its weights make room for the next's
    found = contest.record(done, device)
    print(standing.table(found["cells"]), file=said)
    if arguments.json:
        print(contest.as_json(found))
    return 0 if done else 1


def _tune(arguments: argparse.Namespace) -> int:
    from .inventory import tune_model
    from .options import Options

    cache = arguments.cache or Options.parse()[0].cache
    found = tune_model(
        arguments.model, arguments.tokens, cache=cache, launch=arguments.launch, seconds=arguments.seconds
    )
    _show(arguments, found)
    return 0


def _cache(arguments: argparse.Namespace) -> int:
    from . import inventory
    from .options import Options

    _show(arguments, inventory.ACTIONS[arguments.action](arguments.cache or Options.parse()[0].cache, arguments.what))
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    import torch

    from .options import Options
    from .providers import providers
    from .tables import count

    def installed(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "not installed"

    packages = ("moe_compile", "torch", "triton", "transformers", "flashinfer-python", "sympy")
    registered = [e.value for e in entry_points(group="torch_dynamo_backends") if e.name == "moe"]
    devices = [f"cpu ({count(torch.get_num_threads(), 'thread')})"]
    for i in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(i)
        devices.append(f"cuda:{i} ({facts.name}, sm_{facts.major}{facts.minor}, {facts.total_memory / 2**30:.0f} GiB)")
    found = {
        "versions": {
            "python": platform.python_version(),
            **{p: installed(p) for p in packages},
            "torch": torch.__version__,  # which build it is, beside its version
        },
        "devices": devices,
        "C++ compiler": shutil.which("c++")
        or shutil.which("g++")
        or shutil.which("clang++")
        or "none: Inductor needs one",
        'backend "moe"': registered[0] if registered else "not registered: install the package with pip",
        "providers": {name: str(p.available()) for name, p in providers().items()},
        "options": {k: str(v) for k, v in vars(Options.parse()[0]).items()},
    }
    _show(arguments, found if arguments.json else "\n".join(_outline(found)))
    return 0 if registered else 1


def _outline(tree: dict[str, Any]) -> list[str]:
    lines = []
    for key, value in tree.items():
        if isinstance(value, dict):
            width = max(map(len, value)) + 2
            lines += [key, *(f"  {k:{width}}{v}" for k, v in value.items())]
        elif isinstance(value, list):
            lines += [key, *(f"  {v}" for v in value)]
        else:
            lines.append(f"{key:22}{value}")
    return lines
