"""Options: names, values, precedence, and the documentation printed from the table."""

import dataclasses
import os
from pathlib import Path

import pytest

from moe_compile.options import Options, cache_folder, dump_folder, markdown, one_of

DOCS = Path(__file__).parents[2] / "docs" / "options.md"


def test_defaults_and_rest():
    options, rest = Options.parse({"max_autotune": True, "triton.cudagraphs": False}, {})
    assert options == Options()
    assert rest == {"max_autotune": True, "triton.cudagraphs": False}
    assert dataclasses.asdict(options) == {
        "inner": "inductor",
        "strict": False,
        "provider": "auto",
        "weight_copy_bytes": 0,
        "launch": "auto",
        "keep": "all",
        "train": "auto",
        "tune": "auto",
        "tune_seconds": 20.0,
        "cache": "auto",
        "agree": "auto",
        "agree_seconds": 120.0,
        "data_parallel_rank": 0,
        "route": "auto",
        "verify": False,
        "only": "*",
        "fuel": -1,
    }


@pytest.mark.parametrize(
    ("platform", "setting", "environ", "folder"),
    [
        ("linux", "auto", {"XDG_CACHE_HOME": "/x"}, "/x/moe_compile"),
        ("linux", "auto", {}, os.path.expanduser("~/.cache/moe_compile")),
        ("darwin", "auto", {"XDG_CACHE_HOME": "/x"}, os.path.expanduser("~/Library/Caches/moe_compile")),
        ("win32", "auto", {"LOCALAPPDATA": "/l"}, "/l/moe_compile"),
        ("linux", "off", {"XDG_CACHE_HOME": "/x"}, ""),
        ("linux", "~/mine", {}, os.path.expanduser("~/mine")),
    ],
)
def test_the_cache_is_where_the_platform_keeps_caches(platform, setting, environ, folder, monkeypatch):
    monkeypatch.setattr("sys.platform", platform)
    assert cache_folder(setting, environ) == folder


def test_none_is_no_options():
    assert Options.parse(None, {}) == (Options(), {})


def test_ours_are_taken_out_of_the_rest():
    options, rest = Options.parse({"moe.inner": "eager", "moe.route": "nodes", "epilogue_fusion": True}, {})
    assert (options.inner, options.route, rest) == ("eager", "nodes", {"epilogue_fusion": True})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"moe.iner": "eager"}, r"option: 'moe.iner' is not one of .*moe.strict.*; did you mean 'moe.inner'\?"),
        ({"moe.zzzzzzz": 1}, r"'moe.zzzzzzz' is not one of (?!.*did you mean)"),
        ({"moe.inner": "induktor"}, r"moe.inner: 'induktor' is not one of .*; did you mean 'inductor'\?"),
        ({"moe.inner": 3}, "moe.inner: 3 is not text"),
        ({"moe.fuel": "full"}, "moe.fuel: 'full' is not a whole number of at least -1"),
        ({"moe.fuel": -2}, "moe.fuel: -2 is not a whole number of at least -1"),
        ({"moe.fuel": 2.5}, "moe.fuel: 2.5 is not a whole number"),
        ({"moe.fuel": True}, "moe.fuel: True is not a whole number"),
        ({"moe.weight_copy_bytes": float("inf")}, "moe.weight_copy_bytes: inf is not a whole number"),
        ({"moe.tune_seconds": "long"}, "moe.tune_seconds: 'long' is not a number of at least 0"),
        ({"moe.tune_seconds": float("nan")}, "moe.tune_seconds: nan is not a number"),
        ({"moe.tune": "measured"}, r"moe.tune: 'measured' is not one of .*; did you mean 'measure'\?"),
        ({"moe.strict": "maybe"}, "moe.strict: 'maybe' is not one of 1, true, 0, false"),
    ],
)
def test_bad_options_say_what_is_valid(options, message):
    with pytest.raises(ValueError, match=message):
        Options.parse(options, {})


def test_environment_with_and_without_prefix():
    options, rest = Options.parse({}, {"MOE_COMPILE": "strict=1, moe.inner=aot_eager,route=op,fuel=3,"})
    assert options == Options(strict=True, inner="aot_eager", route="op", fuel=3)
    assert rest == {}


def test_options_win_over_the_environment():
    environ = {"MOE_COMPILE": "strict=true,inner=eager"}
    options, _ = Options.parse({"moe.strict": False}, environ)
    assert options == Options(strict=False, inner="eager")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("strct=1", r"MOE_COMPILE key: 'strct' is not one of .*; did you mean 'strict'\?"),
        ("strict", "MOE_COMPILE: 'strict' is not key=value"),
        ("strict=2", "MOE_COMPILE strict: '2' is not one of"),
        ("max_autotune=1", "MOE_COMPILE key: 'max_autotune' is not one of"),
    ],
)
def test_bad_environment(text, message):
    with pytest.raises(ValueError, match=message):
        Options.parse({}, {"MOE_COMPILE": text})


def test_environment_is_the_process_environment_by_default(monkeypatch):
    monkeypatch.setenv("MOE_COMPILE", "route=nodes")
    monkeypatch.setenv("MOE_COMPILE_DUMP", "/somewhere")
    assert Options.parse()[0].route == "nodes"
    assert dump_folder() == "/somewhere"
    assert dump_folder({}) == ""


def test_options_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().strict = True  # type: ignore[misc]


def test_one_of_names_the_closest():
    assert one_of("moe.provider", "aten", ("aten", "triton_grouped")) == "aten"
    with pytest.raises(ValueError, match=r"did you mean 'triton_grouped'\?"):
        one_of("moe.provider", "triton_group", ("aten", "triton_grouped"))


def test_the_documentation_is_current():
    assert DOCS.read_text() == markdown(), "run: python -m moe_compile.options > docs/options.md"


def test_every_option_is_documented():
    for field in dataclasses.fields(Options):
        assert f"| `moe.{field.name}` |" in markdown()
        assert field.metadata["doc"].endswith(".")


def test_a_comma_inside_parentheses_is_the_candidates():
    options, _ = Options.parse({}, {"MOE_COMPILE": "provider=triton_grouped(M=64,N1=32),weight_copy_bytes=1024"})
    assert (options.provider, options.weight_copy_bytes) == ("triton_grouped(M=64,N1=32)", 1024)
