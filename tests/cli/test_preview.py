"""``preview``: the curve against its closed form, the drawing, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from PIL import Image

from llm_steer import Plugin
from llm_steer.cli.draw import curve


def triangular(t: float, amplitude: float, period: float, phase: float = 0.0) -> float:
    """The definition, piece by piece."""
    u = math.fmod(t + phase * period, period) / period % 1.0
    if u <= 0.25:
        return 4 * amplitude * u
    if u <= 0.75:
        return amplitude - 4 * amplitude * (u - 0.25)
    return -amplitude + 4 * amplitude * (u - 0.75)


@pytest.mark.parametrize("period", [600.0, 1200.0, 37.3])
def test_json_is_the_closed_form(cli, period):
    document = cli(
        "preview", "reflection_cycle", "--amplitude", "5", "--period", str(period), "--length", "9000", "--json"
    ).document
    assert document["t"] == list(range(9000))
    assert document["delta"] == pytest.approx([triangular(t, 5, period) for t in range(9000)], abs=1e-6)
    assert document["plugin"] == "reflection_cycle"
    assert document["params"] == {"amplitude": 5.0, "period": period}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--schedule", "constant", "--amplitude", "-3"], lambda t: -3.0),
        (["--schedule=cosine", "--amplitude=2", "--period=80"], lambda t: 2 * math.cos(2 * math.pi * t / 80)),
        (["--schedule", "linear_decay", "--amplitude", "4", "--period", "50"], lambda t: 4 * (1 - 2 * min(t / 50, 1))),
        (["--schedule", "silver", "--amplitude", "1"], lambda t: 0.25 * ((t % 64 + 1) & -(t % 64 + 1))),
        (["--schedule", "piecewise", "--points", "[[0,4],[100,0]]"], lambda t: max(4 - 0.04 * t, 0)),
        (["--amplitude", "5", "--period", "40", "--phase", "0.25"], lambda t: triangular(t, 5, 40, 0.25)),
        (["--period", "40", "--start-position", "30"], lambda t: triangular(t + 30, 5, 40)),
        (["--period", "40", "--window", "[10, 20]"], lambda t: triangular(t, 5, 40) if 10 <= t < 20 else 0.0),
    ],
)
def test_every_schedule_and_parameter(cli, options, expected):
    document = cli("preview", "reflection_cycle", *options, "--length", "300", "--json").document
    assert document["delta"] == pytest.approx([expected(t) for t in range(300)], abs=1e-6)


def test_start_position_shifts_t_and_window_is_told(cli):
    document = cli(
        "preview", "reflection_cycle", "--start-position", "30", "--window", "[[40, 60]]", "--length", "50", "--json"
    ).document
    assert document["t"] == list(range(30, 80))
    assert document["window"] == [[40, 60]]
    assert [t for t, d in zip(document["t"], document["delta"], strict=True) if d] == list(range(40, 60))


def test_name_with_parameters_and_options_together(cli):
    document = cli(
        "preview", "reflection_cycle:amplitude=2,period=40", "--amplitude", "3", "--leading-space", "--json"
    ).document
    assert document["params"] == {"amplitude": 3.0, "period": 40.0, "leading_space": True}


@pytest.mark.parametrize(
    ("options", "least"),
    [([], 2400), (["--period", "2000000000"], 100_000), (["--schedule", "silver"], 128), (["--preset", "reference"], 8192)],
)
def test_the_length_that_is_left_out_shows_the_whole_form(cli, options, least):
    document = cli("preview", "reflection_cycle", *options, "--json").document
    assert least <= document["length"] <= 110_001


def test_terminal(cli):
    result = cli("preview", "reflection_cycle", "--amplitude", "5", "--period", "1200", "--window", "[[0, 1800]]")
    assert result.code == 0
    lines = result.out.splitlines()
    assert lines[0].startswith("reflection_cycle:{")
    assert any(line.startswith("+5 ┤") for line in lines)
    assert any(line.startswith("-5 ┤") for line in lines)
    window = next(line for line in lines if "━" in line).strip()
    assert 0.7 < window.count("━") / len(window) < 0.8
    assert "from -5 to +5" in result.out
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("unicode", [True, False])
def test_drawing_has_its_peaks_where_the_curve_has(unicode):
    t = list(range(401))
    text = curve(t, [triangular(x, 5, 400) for x in t], width=84, height=9, unicode=unicode, marks=[100]).plain.splitlines()
    start = text[0].index("┤" if unicode else "|") + 1
    blank = "⠀" if unicode else " "
    top = [i for i, c in enumerate(text[0][start:]) if c not in (blank, " ")]
    bottom = [i for i, c in enumerate(text[8][start:]) if c not in (blank, " ")]
    columns = 84 - start
    assert np.mean(top) / columns == pytest.approx(0.25, abs=0.03)
    assert np.mean(bottom) / columns == pytest.approx(0.75, abs=0.03)
    assert text[9].rstrip()[-1] in "▲^"
    assert (len(text[9].rstrip()) - start) / columns == pytest.approx(0.25, abs=0.03)


@pytest.mark.parametrize("values", [[], [0.0], [0.0, 0.0], [1.0], [-2.0, -1.0], [3.0, 1.0]])
def test_drawing_of_degenerate_curves(values):
    assert curve(range(len(values)), values, width=40, height=5).plain.count("\n") == 5


def test_png_shows_the_wave(cli, tmp_path):
    path = tmp_path / "wave.png"
    result = cli("preview", "reflection_cycle", "--amplitude", "5", "--period", "1200", "--out", str(path), "--json")
    assert result.document["file"] == str(path)
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
    height, width, _ = pixels.shape
    assert (width, height) == (1080, 480)
    # The curve is the only thing that is nearly black in the plot's inside: where is it, from left to right?
    inside = pixels[60:370, 80:1060]
    dark = inside.max(axis=2) < 90
    columns = np.nonzero(dark.any(axis=0))[0]
    level = np.array([np.nonzero(dark[:, c])[0].mean() for c in columns])
    assert columns[-1] - columns[0] > 900
    share = (columns - columns[0]) / (columns[-1] - columns[0])
    expected = np.array([triangular(2400 * s, 1, 1200) for s in share])
    assert np.corrcoef(-level, expected)[0, 1] > 0.98
    # Promoted is green, suppressed red.
    green = (inside[..., 1] - inside[..., 0] > 20).sum(axis=1).nonzero()[0]
    red = (inside[..., 0] - inside[..., 1] > 20).sum(axis=1).nonzero()[0]
    assert green.mean() < red.mean()


@pytest.mark.parametrize("suffix", [".svg", ".pdf"])
def test_other_formats(cli, tmp_path, suffix):
    path = tmp_path / f"wave{suffix}"
    assert cli("preview", "reflection_cycle", "--out", str(path)).code == 0
    assert path.stat().st_size > 1000


def test_without_matplotlib_the_terminal_still_works(cli, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert cli("preview", "reflection_cycle").code == 0
    result = cli("preview", "reflection_cycle", "--out", str(tmp_path / "wave.png"))
    assert result.code == 2
    assert "pip install 'llm-steer-plugin[plot]'" in result.err


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["--amplitude", "101"], "--amplitude"),
        (["--amplitude", "nan"], "--amplitude"),
        (["--amplitude", "inf"], "--amplitude"),
        (["--amplitude", "five"], "--amplitude"),
        (["--amplitude"], "--amplitude"),
        (["--amplitude", ""], "--amplitude"),
        (["--period", "0"], "--period"),
        (["--period", "-5"], "--period"),
        (["--phase", "2"], "--phase"),
        (["--schedule", "square"], "--schedule"),
        (["--schedule", "constant", "--period", "5"], "--period"),
        (["--points", "[[0,"], "--points"),
        (["--schedule", "piecewise"], "--points"),
        (["--window", "[[5, 2]]"], "--window"),
        (["--amplitde", "5"], "--amplitde"),
        (["--preset", "paper"], "--preset"),
        (["--length", "0"], "--length"),
        (["--length", "-3"], "--length"),
        (["--length", "1000001"], "--length"),
        (["--length", "ten"], "--length"),
        (["surplus"], "arguments"),
        (["--out", "wave.txt"], "--out"),
        (["--out", "no/such/folder/wave.png"], "--out"),
    ],
)
def test_bad_input_names_the_field(cli, options, field):
    error = cli("preview", "reflection_cycle", "--json", *options).error
    assert error["field"] == field
    assert error["message"]
    plain = cli("preview", "reflection_cycle", *options)
    assert plain.code == 2
    assert plain.err.count("\n") == 1
    assert "Traceback" not in plain.err


def test_an_option_without_its_value_says_so(cli):
    for options in (["--amplitude"], ["--amplitude", "--period", "5"], ["--leading-space", "--start-position"]):
        result = cli("preview", "reflection_cycle", *options)
        assert result.code == 2
        name = next(option for option in options if option in ("--amplitude", "--start-position"))
        assert f"{name}: got ''; must be followed by a value" in result.err


def test_an_unknown_option_is_told_the_known_ones(cli):
    for options, value in ((["--nonsense", "5"], "5"), (["--nonsense"], ""), (["--lenght=5"], "5")):
        error = cli("preview", "reflection_cycle", "--json", *options).error
        assert (error["field"], error["value"]) == (options[0].partition("=")[0], value)
        assert all(name in error["valid"] for name in ("--amplitude", "--start-position", "--length", "--out"))
    assert "did you mean '--length'?" in error["valid"]


def test_a_plugin_without_a_preview(cli, register):
    class Plain(Plugin):
        name = "plain"

    register(Plain)
    result = cli("preview", "plain")
    assert result.code == 2
    assert "no preview" in result.err


def test_any_plugin_can_offer_one(cli, register):
    class Stairs(Plugin):
        name = "stairs"

        @classmethod
        def preview(cls, params, length=None):
            return {"t": list(range(length or 8)), "delta": [float(i // 2) for i in range(length or 8)]}

    register(Stairs)
    document = cli("preview", "stairs", "--json").document
    assert document["delta"] == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    assert "stairs" in cli("preview", "stairs", "--length", "4").out


def test_lists_are_json_or_have_commas_between_their_items(cli):
    def params(*options):
        return cli("preview", "reflection_cycle", *options, "--length", "8", "--json").document["params"]

    written = {"words": ["Wait", "But"], "token_ids": [3, 5]}
    assert params("--words", "Wait,But", "--token-ids=3,5") == written
    assert params("--words", '["Wait", "But"]', "--token-ids", "[3, 5]") == written
    assert params("--window", "[[0, 100]]") == {"window": [[0, 100]]}
    assert params("--words", "Wait") == {"words": ["Wait"]}
