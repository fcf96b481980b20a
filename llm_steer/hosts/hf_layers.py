"""Finding the decoder layers of a Hugging Face model, and running ``residual`` hooks behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from llm_steer.errors import SteerError, UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def find_layers(model: PreTrainedModel, path: str | None = None) -> torch.nn.ModuleList:
    """The list of decoder layers of a model.

    Args:
        path: where it is (``"model.layers"``), for models where it is not found.

    Raises:
        SteerError: there is no list of layers at ``path``.
        UnsupportedError: the layers were not found.
    """
    if path is not None:
        try:
            layers = model.get_submodule(path)
        except AttributeError as error:
            raise SteerError("layers_path", path, f"the path of the decoder layers ({error})") from error
        if not isinstance(layers, torch.nn.ModuleList):
            raise SteerError("layers_path", path, f"the path of a ModuleList, not of a {type(layers).__name__}")
        return layers
    decoder: torch.nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    count = decoder_config(model).num_hidden_layers
    unsplit = set(getattr(model, "_no_split_modules", None) or ())
    lists = [
        (name, module)
        for name, module in decoder.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == count
    ]
    # Multimodal wrappers and encoder-decoder models hold other lists, at times of the same length.
    found = [module for name, module in lists if "encoder" not in name.split(".")]
    if len(found) > 1:
        found = [module for module in found if type(module[0]).__name__ in unsplit]
    if len(found) == 1:
        return found[0]
    raise UnsupportedError(
        f"the {count} decoder layers of {type(model).__name__} were not found; name them: "
        'steer(model, ..., layers_path="model.layers")'
    )


def decoder_config(model: PreTrainedModel) -> Any:
    """The part of the configuration that describes the text decoder."""
    return model.config.get_text_config(decoder=True)


# The hook reads the state of the call in progress, which a compiled graph cannot: it breaks the graph here instead of
# being traced with one call's state baked in.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def run_behind(
    residual: Callable[[int, torch.Tensor], None], layer: int, _module: torch.nn.Module, _inputs: Any, output: Any
) -> Any:
    """Forward hook: hand the layer's hidden states to ``residual``. Most layers return a tensor, older ones a tuple."""
    residual(layer, output[0] if isinstance(output, tuple) else output)
