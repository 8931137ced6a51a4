"""The command: text and JSON, exit codes, one-line errors, and a reader that goes away."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe_compile import bench, cli, demo
from moe_compile.explain import Report

MEASURED = Path(__file__).parents[2] / "docs" / "measured"


def run(capsys, *arguments):
    code = cli.main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny OLMoE on disk."""
    import transformers

    config = transformers.OlmoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("olmoe")
    transformers.OlmoeForCausalLM(config).save_pretrained(path)
    return str(path)


def test_explain_a_folder(capsys, folder):
    code, out, err = run(capsys, "explain", folder, "--tokens", "5")
    assert code == 0, err
    assert out.startswith("moe_compile: 1 graph, 2 of 2 MoE blocks replaced, 0 not proved\n")
    assert "model.layers.0.mlp.experts, model.layers.1.mlp.experts: 2 blocks" in out


def test_explain_json(capsys, folder):
    code, out, _ = run(capsys, "explain", folder, "--json")
    assert code == 0
    report = json.loads(out)
    assert [r["where"]["module"] for r in report["regions"]] == [
        "model.layers.0.mlp.experts",
        "model.layers.1.mlp.experts",
    ]
    assert report["regions"][0]["spec"].startswith("experts(E=8 K=2 H=32 I=16 act=swiglu")


def configuration(path, config):
    """A folder with a configuration and no weights."""
    config.save_pretrained(path)
    return str(path)


def test_a_configuration_is_enough(capsys, tmp_path):
    import transformers

    # 6 billion parameters, of which none is ever made
    config = transformers.MixtralConfig(num_hidden_layers=4, architectures=["MixtralForCausalLM"])
    code, out, err = run(capsys, "explain", configuration(tmp_path, config))
    assert code == 0, err
    assert out.startswith("moe_compile: 1 graph, 4 of 4 MoE blocks replaced, 0 not proved\n")
    assert "2 of 8 experts a token, 4096 -> 14336 -> 4096, swiglu" in out
    assert "has no weights: explained from its configuration" in err


def test_a_configuration_is_planned_for_a_gpu_that_is_not_here(capsys, tmp_path):
    import transformers

    config = transformers.MixtralConfig(num_hidden_layers=1, architectures=["MixtralForCausalLM"], dtype="bfloat16")
    folder = configuration(tmp_path, config)
    code, out, err = run(capsys, "explain", folder, "--arch", "H200")
    assert code == 0, err
    assert "predicted   on H200 (sm_90, 132 processors, 4.80 TB/s)" in out
    assert "triton_decode(" in out and "triton_grouped(" in out
    code, out, err = run(capsys, "explain", folder, "--arch", "H2000")
    assert (code, out) == (1, "") and "device 'H2000' is not one of" in err


def test_a_model_without_moe_says_so(capsys, tmp_path):
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
    config = transformers.LlamaConfig(num_hidden_layers=1, **sizes)
    code, out, _ = run(capsys, "explain", configuration(tmp_path, config))
    assert code == 0
    assert "nothing in the graphs looks like an MoE block" in out


def test_a_folder_of_something_else_is_one_line(capsys, tmp_path):
    code, out, err = run(capsys, "explain", str(tmp_path))
    assert (code, out) == (1, "")
    assert err == f"moe-compile: error: {tmp_path} has no config.json: it is not the folder of a HuggingFace model\n"


DENSE = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 100,
}  # fmt: skip


def test_doctor(capsys):
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert torch.__version__ in out
    code, out, _ = run(capsys, "doctor", "--json")
    facts = json.loads(out)
    assert facts['backend "moe"'] == "moe_compile.backend:moe_backend"
    assert facts["providers"]["aten"] == "ok"
    assert facts["options"]["inner"] == "inductor"


def test_doctor_reads_the_environment(capsys, monkeypatch):
    monkeypatch.setenv("MOE_COMPILE", "iner=eager")
    code, out, err = run(capsys, "doctor")
    assert (code, out) == (1, "")
    assert err.startswith("moe-compile: error: MOE_COMPILE key: 'iner' is not one of")
    assert err.count("\n") == 1


@pytest.mark.parametrize("path", ["/no/such/folder", "./nothing", "~/nothing"])
def test_a_missing_folder_is_one_line(capsys, path):
    code, out, err = run(capsys, "explain", path)
    assert (code, out, err) == (1, "", f"moe-compile: error: {path} is not a folder\n")


def test_traceback_on_request():
    with pytest.raises(ValueError, match="is not a folder"):
        cli.main(["explain", "/no/such/folder", "--traceback"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("explain", "--thiek", "4,2048,768,8,128"),
            "--thiek 4,2048,768,8,128: not T,H,I,E,K, whose K=128 choices are",
        ),
        (("explain", "{}", "--formulas"), "--formulas is of a block: it needs --thiek"),
        (("explain", "{}", "--device", "gpu0"), "gpu0"),
        (("explain", "--thiek", "4,64,32,8,2", "--device", "cpu"), "what a block is planned for is --arch"),
        (("bench", "--read", "{}/config.json"), "config.json is not what `moe-compile bench --json` prints"),
        (("calibrate", "{}/config.json"), "config.json is not what `moe-compile bench --json` prints"),
        (("calibrate", str(MEASURED / "h200.json")), "h200.json: no times of tactics"),
        (("bench", "--geometry", "tiny", "--only", "moo"), "--only moo: no column of moe, "),
    ],
)
def test_a_mistake_is_one_line(capsys, tmp_path, arguments, message):
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    code, out, err = run(capsys, *(a.format(tmp_path) for a in arguments))
    assert (code, out) == (1, "")
    assert err.startswith("moe-compile: error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "required: COMMAND"),
        (("expain", "x"), "invalid choice: 'expain'"),
        (("explain",), "one of the arguments MODEL --thiek is required"),
        (("explain", "x", "--tokens", "0"), "'0' is not a whole number of at least 1"),
        (("explain", "x", "--tokens", "many"), "'many' is not a whole number of at least 1"),
        (("explain", "--thiek", "4,64,32,8,2", "--formulas", "--crossovers"), "not allowed with argument --formulas"),
        (("cache",), "required: ACTION"),
        (("cache", "show"), "required: NAME"),
        (("cache", "import", "--json"), "required: FILE"),
        (("cache", "clear", "all"), "unrecognized arguments: all"),
    ],
)
def test_wrong_usage_exits_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "names", "options"),
    [
        (("explain",), ("x",), ("--arch", "H200", "--tokens", "4")),
        (("tune",), ("x",), ("--cache", "c", "--seconds", "3")),
        (("cache", "list"), ("x",), ("--cache", "c", "--json")),
        (("cache", "show"), ("x",), ("--cache", "c", "--json")),
        (("cache", "export"), ("x",), ("--cache", "c")),
        (("cache", "import"), ("x",), ("--cache", "c")),
        (("calibrate",), ("x", "y"), ("--held-out", "h", "--held-out", "i", "--traceback")),
    ],
)
def test_options_and_names_come_in_any_order(command, names, options):
    parse = lambda *arguments: vars(cli._parser().parse_args(arguments))
    found = parse(*command, *names, *options)
    assert found == parse(*command, *options, *names)
    assert [*names] in (found.get("files"), [found.get("model")], [found.get("what")])
    if len(command) > 1:
        assert found == parse(command[0], *options, command[1], *names)
        assert (found["action"], found["cache"]) == (command[1], "c")


@pytest.mark.parametrize("arguments", [("--help",), ("demo", "--help"), ("explain", "--help"), ("doctor", "--help")])
def test_help_has_examples(capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "example" in text
    assert "moe-compile " + (arguments[0] if len(arguments) > 1 else "doctor") in text


def test_a_reader_that_goes_away():
    """`moe-compile doctor | true`: no message, and the exit code of a broken pipe."""
    command = [sys.executable, "-m", "moe_compile", "doctor"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.wait(120) == 141
    with process.stderr:
        assert process.stderr.read() == ""


# --- demo: the whole of it runs in .ci/run; here, what it says and when it fails -------------------------------------


def a_demo(**changes):
    timing = lambda s: bench.Timing(samples=(s, s, s))
    fields = {
        "model": "a model",
        "report": Report.from_events([]),
        "blocks": 0,
        "errors": {"eager": (2e-6, 1e-7), "inductor": (2e-6, 1e-7), "moe": (1e-6, 1.5e-7)},
        "times": {1: {"eager": timing(4e-3), "inductor": timing(2e-3), "moe": timing(1e-3)}},
        "compile_seconds": {"inductor": 20.0, "moe": 10.0},
    }
    return demo.Demo(**{**fields, **changes})


def test_demo_prints_errors_times_and_ratio():
    text = str(a_demo())
    assert "  moe          1.0e-06   1.5e-07" in text
    line = next(x for x in text.splitlines() if x.startswith("  1 "))
    assert [float(x) for x in line.replace("+-  0%", "").split()] == [1, 4, 2, 1, 0.5]
    assert json.loads(json.dumps(a_demo().as_dict()))["seconds"]["1"]["moe/inductor"] == 0.5


def test_demo_fails_where_a_block_stayed_or_numbers_are_off(capsys, monkeypatch):
    assert a_demo().ok
    assert not a_demo(blocks=2).ok
    assert not a_demo(errors={**a_demo().errors, "moe": (1e-6, 5e-7)}).ok
    slow = {1: dict(zip(("eager", "inductor", "moe"), reversed(a_demo().times[1].values()), strict=True))}
    assert a_demo(times=slow).ok  # time is told, not judged
    for blocks, code in ((0, 0), (2, 1)):
        monkeypatch.setattr(demo, "run", lambda say, blocks=blocks: a_demo(blocks=blocks))
        assert run(capsys, "demo")[0] == code


def test_demo_model_is_what_it_says():
    model, text = demo.build_model("cpu")
    assert model.config.num_hidden_layers == demo.SIZES["cpu"]["layers"]
    assert model.config.num_experts == demo.SIZES["cpu"]["E"]
    assert next(model.parameters()).dtype == torch.float32
    assert "float32 on cpu" in text
    again, _ = demo.build_model("cpu")
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_demo_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        a_demo().blocks = 3


def test_tune_a_folder_then_see_and_move_the_results(capsys, folder, tmp_path, monkeypatch):
    mine, file, theirs = (str(tmp_path / n) for n in ("mine", "tuned.jsonl", "theirs"))
    monkeypatch.setattr("moe_compile.choose.OPEN_BUCKET", 64)
    monkeypatch.setattr("moe_compile.choose.TOKEN_BUCKETS", (1, 16, None))
    monkeypatch.setattr("moe_compile.plan.TOKEN_BUCKETS", (1, 16, None))
    code, out, err = run(capsys, "tune", folder, "--tokens", "8", "--cache", mine)
    assert code == 0, err
    assert (
        out.startswith(f"{mine}: 4 results, 1 of them beside a block's own nodes\n")
        and "E=8 K=2 H=32 I=16 swiglu f32" in out
        and "3 buckets" in out
    )
    torch._dynamo.reset()

    code, out, _ = run(capsys, "cache", "list", "--json", "--cache", mine)
    (held,) = json.loads(out)["held"]
    assert [b["tokens"] for b in held["buckets"]] == ["1", "16", "*"]
    assert all(b["trials"][0]["us"] > 0 and b["workload"] == "tokens=varied:1" for b in held["buckets"])
    monkeypatch.setenv("MOE_COMPILE", f"cache={mine}")
    code, out, _ = run(capsys, "cache", "show", held["name"])
    assert code == 0 and "on tokens=varied:1" in out and out.count("aten(path=hit)") == 3

    assert run(capsys, "cache", "export", file)[0] == 0
    assert run(capsys, "cache", "import", file, "--cache", theirs)[1] == "4 results imported\n"
    assert run(capsys, "cache", "list", "--cache", theirs)[1].splitlines()[1:] == out_lines(capsys, mine)
    text = (tmp_path / "tuned.jsonl").read_text().replace('"device":"', '"device":"another ')
    (tmp_path / "tuned.jsonl").write_text(text)
    code, _, err = run(capsys, "cache", "import", file, "--cache", theirs)
    assert code == 1 and "not of this machine" in err and "device: 'another" in err
    assert run(capsys, "cache", "clear", "--cache", theirs)[0] == 0
    assert run(capsys, "cache", "list", "--cache", theirs)[1] == f"{theirs}: 0 results\n"


def out_lines(capsys, cache):
    return run(capsys, "cache", "list", "--cache", cache)[1].splitlines()[1:]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cache", "show", "nothing"), "matches 'nothing'"),
        (("cache", "import", "missing.jsonl"), "missing.jsonl"),
    ],
)
def test_cache_says_what_it_needs(capsys, tmp_path, arguments, message):
    code, _, err = run(capsys, *arguments, "--cache", str(tmp_path))
    assert code == 1 and message in err
