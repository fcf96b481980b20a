"""``generate`` on a tiny random model: both answers, the trace, and what is refused."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from llm_steer import steer
from llm_steer.cli import generate as module
from support.vocabulary import REFLECTION

WAVE = {"amplitude": 60, "period": 8}
SPEC = "reflection_cycle:amplitude=60,period=8"
PROMPT = "one two three"


@pytest.fixture
def answer(cli, folder):
    def call(*arguments):
        return cli("generate", PROMPT, "--model", str(folder), "--max-new-tokens", "24", *arguments)

    return call


def expected(folder, spec, **options):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    if spec:
        steer(model, "reflection_cycle", tokenizer=tokenizer, **spec)
    messages = [{"role": "user", "content": PROMPT}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    torch.manual_seed(options.pop("seed", 0))
    output = model.generate(**inputs, max_new_tokens=24, **{"do_sample": False, **options})
    return output[0, inputs["input_ids"].shape[1] :].tolist()


def test_compare_json_holds_both_answers(answer, folder):
    document = answer("--steer", SPEC, "--compare", "--json").document
    assert document["unsteered"]["token_ids"] == expected(folder, None)
    assert document["steered"]["token_ids"] == expected(folder, WAVE)
    assert document["unsteered"]["token_ids"] != document["steered"]["token_ids"]
    assert document["steer"] == [{"name": "reflection_cycle", "amplitude": 60.0, "period": 8.0}]
    assert document["unsteered"]["trace"] is None
    assert document["steered"]["tokens"] == 24


def test_marks_are_the_reflection_tokens_with_their_offsets(answer):
    steered = answer("--steer", SPEC, "--json").document["steered"]
    where = [i for i, token in enumerate(steered["token_ids"]) if token in REFLECTION]
    assert where
    assert [mark["position"] for mark in steered["marked"]] == where
    (plugin,) = steered["trace"]["plugins"]
    assert plugin["positions"] == where
    for mark in steered["marked"]:
        u = mark["position"] % 8 / 8
        d = 240 * u if u <= 0.25 else 60 - 240 * (u - 0.25) if u <= 0.75 else -60 + 240 * (u - 0.75)
        assert mark["delta"] == pytest.approx(d, abs=1e-5)
        assert mark["id"] == steered["token_ids"][mark["position"]]


def test_without_compare_there_is_no_unsteered_answer(answer):
    assert answer("--steer", SPEC, "--json").document["unsteered"] is None


def test_off_is_the_plain_answer(answer, folder):
    document = answer("--steer", "off", "--json").document
    assert document["steered"]["token_ids"] == expected(folder, None)
    assert document["steer"] == []
    assert document["steered"]["trace"] is None
    assert "Not steered" in answer("--steer", "off").out


def test_sampling_is_seeded(answer, folder):
    options = ("--steer", SPEC, "--temperature", "0.8", "--top-p", "0.9", "--json")
    first, again, other = (answer(*options, "--seed", seed).document["steered"] for seed in ("7", "7", "8"))
    assert first["token_ids"] == again["token_ids"] != other["token_ids"]
    wanted = expected(folder, WAVE, seed=7, do_sample=True, temperature=0.8, top_p=0.9, top_k=0)
    assert first["token_ids"] == wanted


def test_another_model_gets_the_plugins_own_defaults(answer):
    assert answer("--json").document["steer"] == [{"name": "reflection_cycle"}]


def test_side_by_side_marks_the_text(answer):
    result = answer("--steer", SPEC, "--compare")
    assert result.code == 0
    assert "unsteered" in result.out
    assert "steered" in result.out
    assert "«" in result.out
    assert "steer  reflection_cycle:amplitude=60,period=8" in result.out
    assert "position  token" in result.out


def test_text_is_streamed_as_it_comes(answer, monkeypatch):
    pieces: list[str] = []
    monkeypatch.setattr("llm_steer.cli.common.Output.text", lambda self, text: pieces.append(text))
    text = answer("--steer", SPEC, "--json").document["steered"]["text"]
    assert pieces == []
    assert answer("--steer", SPEC).code == 0
    assert "".join(pieces).strip() == text


def test_marked_text_is_the_text_with_brackets(answer, folder):
    document = answer("--steer", SPEC, "--json").document["steered"]
    engine = module.Engine(str(folder), "cpu", "auto")
    shown = module.Answer(
        document["token_ids"], document["text"], 1.0, None, {m["position"]: m["delta"] for m in document["marked"]}
    )
    text = module.marked(shown, engine, True).plain
    assert text.replace("«", "").replace("»", "") == document["text"]
    assert text.count("«") == len(document["marked"])
    assert "[" in module.marked(shown, engine, False).plain


def test_prompt_from_standard_input_and_the_embedded_one(cli, folder, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("four three"))
    options = ("--model", str(folder), "--max-new-tokens", "4", "--json")
    assert cli("generate", "-", *options).document["prompt"] == "four three"
    assert "apples" in cli("generate", *options).document["prompt"]


def test_chat_template_system_and_plain_text(answer, folder):
    chat = answer("--json").document["prompt_tokens"]
    assert chat == 4  # <think> at the end
    assert answer("--no-chat", "--json").document["prompt_tokens"] == 3
    assert answer("--system", "so is", "--json").document["prompt_tokens"] == 6
    (folder / "chat_template.jinja").unlink()
    result = answer("--json")
    assert result.document["prompt_tokens"] == 3
    assert "no chat template" in result.err
    assert answer("--system", "so is", "--json").error["field"] == "--system"


def test_several_plugins(answer, register):
    from llm_steer import Plugin

    class Ban(Plugin):
        name = "ban"

        def logits(self, logits, rows):
            logits[:, REFLECTION] -= 1000.0

    register(Ban)
    document = answer("--steer", SPEC, "--steer", "ban", "--json").document
    assert [item["name"] for item in document["steer"]] == ["reflection_cycle", "ban"]
    assert not set(document["steered"]["token_ids"]) & set(REFLECTION)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["--max-new-tokens", "0"], "--max-new-tokens"),
        (["--max-new-tokens", "-1"], "--max-new-tokens"),
        (["--max-new-tokens", "many"], "--max-new-tokens"),
        (["--max-new-tokens", "1.5"], "--max-new-tokens"),
        (["--max-new-tokens", "100000"], "--max-new-tokens"),
        (["--temperature", "-1"], "--temperature"),
        (["--temperature", "nan"], "--temperature"),
        (["--temperature", "inf"], "--temperature"),
        (["--temperature", "hot"], "--temperature"),
        (["--top-p", "0"], "--top-p"),
        (["--top-p", "1.1"], "--top-p"),
        (["--seed", "-1"], "--seed"),
        (["--dtype", "int8"], "--dtype"),
        (["--device", "tpu9"], "--device"),
        (["--no-chat", "--system", "x"], "--system"),
        (["--steer", "reflection_cycle:amplitude=500"], "reflection_cycle:amplitude"),
        (["--steer", "reflection_cycle:amplitude"], "reflection_cycle:amplitude"),
        (["--steer", "reflection_cycle:words=wait"], "reflection_cycle:words"),
        (["--steer", 'reflection_cycle:{"words": ["zzz"]}'], "words"),
        (["--steer", "reflection_cycle:@missing.yaml"], "reflection_cycle"),
        (["--steer", "nonsense"], "steer"),
        (["--steer", "reflection_cycle", "--steer", "reflection_cycle"], "steer[1]"),
        (["--steer", "off", "--steer", "reflection_cycle"], "steer"),
        (["--unknown"], "--unknown"),
    ],
)
def test_bad_input_names_the_field(answer, options, field):
    error = answer("--json", *options).error
    assert error["field"].endswith(field)
    plain = answer(*options)
    assert plain.code == 2
    assert "Traceback" not in plain.err
    assert plain.err.strip().splitlines()[-1].startswith("llm-steer: ")


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_an_empty_prompt(cli, folder, prompt):
    assert cli("generate", prompt, "--model", str(folder), "--json").error["field"] == "PROMPT"


def test_a_prompt_that_is_not_utf_8(cli, folder, monkeypatch):
    """Python hands on the bytes of a command line or of standard input that it cannot decode as lone surrogates."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"four \xff"), "utf-8", errors="surrogateescape"))
    for prompt in (b"four \xff".decode(errors="surrogateescape"), "-"):
        error = cli("generate", prompt, "--model", str(folder), "--json").error
        assert error["field"] == "PROMPT"
        assert "text in UTF-8" in error["valid"]


def test_damaged_weights_are_one_line(cli, folder):
    (folder / "model.safetensors").write_bytes(b"not weights")
    result = cli("generate", PROMPT, "--model", str(folder))
    assert result.code == 2
    assert "a model that transformers can load" in result.err
    assert "Traceback" not in result.err


def test_ctrl_c_exits_130(cli, folder, monkeypatch):
    def interrupted(self, *arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(module.Engine, "run", interrupted)
    result = cli("generate", PROMPT, "--model", str(folder))
    assert result.code == 130
    assert "Traceback" not in result.err


def test_as_a_process(folder):
    """Nothing but the document on standard output, whatever libraries print."""
    command = [sys.executable, "-c", "from llm_steer.cli import main; main()", "generate", PROMPT, "--model", str(folder)]
    done = subprocess.run(
        [*command, "--json", "--max-new-tokens", "4"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steered"]["tokens"] == 4
