"""What every command does in the same way: output, errors, plugins and models."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llm_steer.errors import SteerError, UnsupportedError, shorten_text

if TYPE_CHECKING:
    from rich.console import Console

    from llm_steer.plugin import Params, Plugin
    from llm_steer.spec import Spec

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output, and nothing else there.")]


class Output:
    """A command's standard output; what libraries print goes to standard error instead."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.stream = sys.stdout

    def document(self, document: Any) -> None:
        """Print the JSON document."""
        # Names as they are where the stream can show them; NaN is no JSON and would be a mistake of ours.
        text = json.dumps(document, indent=2, ensure_ascii=not _shows(self.stream, "é…▁Ġ"), allow_nan=False)
        self.stream.write(text + "\n")
        self.stream.flush()

    def text(self, text: str) -> None:
        """Print text as it is, without a line break; used for streams of tokens."""
        self.stream.write(text)
        self.stream.flush()

    @property
    def console(self) -> Console:
        from rich.console import Console

        return Console(file=self.stream, highlight=False)

    @property
    def unicode(self) -> bool:
        """The terminal can show block and line characters."""
        return _shows(self.stream, "⣿┤▁")


@contextmanager
def output(as_json: bool) -> Iterator[Output]:
    out = Output(as_json)
    with redirect_stdout(sys.stderr):
        yield out


def note(line: str) -> None:
    """Tell the user something that is not the result."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def at_work(*, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Tells on standard error what a command is at: in one line of a terminal that goes away, else line by line."""
    if quiet:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    if not console.is_terminal:
        yield note
        return
    with console.status("") as status:
        yield lambda line: status.update(Text(line))


# -- checks --------------------------------------------------------------------------------------------------------------


def check_range(field: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    """Raise ``SteerError`` unless ``low <= value <= high`` (``low < value`` if ``above``). NaN is never in range."""
    if (low < value if above else low <= value) and value <= high:
        return
    lower = f"greater than {low:g}" if above else f"at least {low:g}"
    raise SteerError(field, value, f"a number {lower}" + ("" if math.isinf(high) else f" and at most {_plain(high)}"))


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else f"{number:g}"


def get_plugin(name: str) -> type[Plugin[Any]]:
    from llm_steer import registry

    try:
        return registry.get(name)
    except RuntimeError as error:  # installed, but broken
        raise UnsupportedError(str(error)) from error


def parse_specs(texts: Sequence[str]) -> Spec:
    """Validate the ``--steer`` options of a command, in order; ``off`` alone steers nothing.

    What later turns out to be wrong with a parameter is told as ``NAME:parameter``, the way it was written.
    """
    from llm_steer.spec import OFF, parse, parse_option

    if list(texts) in ([], [OFF]):
        return ()
    spec = []
    for text in texts:
        get_plugin(text.partition(":")[0])
        spec.append(parse_option(text))
    parse([{"name": steer.name, **steer.params.model_dump(exclude_unset=True)} for steer in spec])  # how many, each once
    return tuple(spec)


def spec_text(name: str, parameters: dict[str, Any]) -> str:
    """A plugin with parameters in the form that ``--steer`` takes."""
    if not parameters:
        return name
    parameters = {key: int(v) if isinstance(v, float) and v == int(v) else v for key, v in parameters.items()}
    if all(isinstance(value, int | float) or _is_word(value) for value in parameters.values()):
        return f"{name}:" + ",".join(f"{key}={json.dumps(value).strip(chr(34))}" for key, value in parameters.items())
    return f"{name}:{json.dumps(parameters, ensure_ascii=False)}"


def given(params: Params) -> dict[str, Any]:
    """The parameters that a caller set, and what a preset stands for only where it differs from the preset."""
    own = params.model_dump(mode="json", exclude_unset=True)
    if (preset := own.get("preset")) is None:
        return own
    implied = type(params).model_validate({"preset": preset}).model_dump(mode="json", exclude_unset=True)
    return {key: value for key, value in own.items() if key == "preset" or key not in implied or implied[key] != value}


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[a-z_]+", value) is not None and value not in ("true", "false", "null")


# -- models --------------------------------------------------------------------------------------------------------------


TOKENIZER_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")


def find_model(name: str | None, field: str, *, tokenizer_only: bool = False, hub: bool = True) -> tuple[str, str]:
    """What ``from_pretrained`` takes for a model, and what to call it.

    Args:
        name: a folder, a Hugging Face model id, or ``default`` (or None) for the embedded model.
        field: the option that holds it, for errors.
        tokenizer_only: a folder with nothing but a tokenizer will do.
        hub: see whether a model of that id can be had.

    Raises:
        SteerError: there is no such folder, or no such model on the hub or in its cache.
    """
    from llm_steer import default_model

    wanted = TOKENIZER_FILES if tokenizer_only else TOKENIZER_FILES[:1]

    if name is None or name == default_model.NAME:
        return str(default_model.ensure()), default_model.LABEL
    path = Path(name).expanduser()
    if path.is_dir():
        if not any((path / file).is_file() for file in wanted):
            raise SteerError(field, name, f"a model's folder: this one has no {' and no '.join(wanted)}")
        return str(path), name
    if path.is_file():
        raise SteerError(field, name, "a folder with config.json, weights and tokenizer, not a file")
    separators = {"/", os.sep}
    if name[:1] in (".", "~", *separators) or sum(name.count(s) for s in separators) > 1:
        raise SteerError(field, name, "a folder that exists, or a Hugging Face model id")
    if not re.fullmatch(r"[\w][\w.-]*(/[\w][\w.-]*)?", name):
        raise SteerError(field, name, "a model's folder, or a Hugging Face model id such as Qwen/Qwen3-0.6B")
    if hub:
        _ask_hub(name, field, wanted)
    return name, name


def _ask_hub(name: str, field: str, wanted: Sequence[str]) -> None:
    """Raise ``SteerError`` unless the hub or its cache has the model: asks once, where loading tries for a minute."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        if any(isinstance(try_to_load_from_cache(name, file), str) for file in wanted):
            return
        get_hf_file_metadata(hf_hub_url(name, wanted[0]))
    except GatedRepoError as error:
        raise SteerError(field, name, "a model that you have access to on the Hugging Face hub (hf auth login)") from error
    except RepositoryNotFoundError as error:
        valid = "a model's folder, or a Hugging Face model id: the hub has none of that name that is public or yours"
        raise SteerError(field, name, valid) from error
    except HfHubHTTPError:
        return  # it answers: loading the model says more
    except HFValidationError as error:
        raise SteerError(field, name, f"a model's folder, or a Hugging Face model id ({error})") from error
    except Exception as error:  # of whatever library carries the question; or the hub was turned off by its variable
        valid = f"a model's folder, or a model in the Hugging Face hub's cache: the hub cannot be reached ({_reason(error)})"
        raise SteerError(field, name, valid) from error


@contextmanager
def loading(name: str, field: str) -> Iterator[None]:
    """Turn whatever goes wrong while a model is loaded into one line that names the model."""
    try:
        yield
    except (SteerError, UnsupportedError):
        raise
    except Exception as error:  # any library below may raise anything on a damaged file
        valid = f"a model that transformers can load ({type(error).__name__}: {_reason(error)})"
        raise SteerError(field, name, valid) from error


def _reason(error: Exception) -> str:
    """The first line of what an error says."""
    return shorten_text(next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__))


def quiet_transformers() -> None:
    """Only errors, also of the hub, and progress only where somebody watches."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def load_tokenizer(source: str, name: str, field: str) -> Any:
    from transformers import AutoTokenizer

    with loading(name, field):
        return AutoTokenizer.from_pretrained(source)


def logits_width(source: str, name: str, field: str) -> int:
    """Width of the model's logits, from its configuration alone."""
    from transformers import AutoConfig

    with loading(name, field):
        config = AutoConfig.from_pretrained(source)
        return int(config.get_text_config(decoder=True).vocab_size)


def _shows(stream: Any, characters: str) -> bool:
    try:
        characters.encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
