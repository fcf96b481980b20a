"""A model for images and text: the decoder layers are those of its language model, on both hosts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from e2e import scenarios, tiny
from e2e.conftest import Engines
from e2e.test_residual_methods import BLANK, CONSTANTS, Told, check_loop

IMAGE, TOKENS = "w400", 16
SIDE, PATCH = 28, 14


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama behind a CLIP tower that has as many layers."""
    from transformers import AutoConfig, LlavaForConditionalGeneration, LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens([IMAGE], special_tokens=True)  # a piece that it has; now also found within a word
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    special = {"vocab_size": tiny.VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = AutoConfig.for_model(
        "llava",
        text_config={"model_type": "llama", **sizes, **special, "num_key_value_heads": 2, "tie_word_embeddings": False},
        vision_config={"model_type": "clip_vision_model", **sizes, "image_size": SIDE, "patch_size": PATCH},
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "vision_tower" not in name:
                weight.mul_(tiny.scale(name))
        model.lm_head.weight[BLANK] *= 15.0  # so that there are steps
    model.generation_config.eos_token_id = 2
    folder = tmp_path_factory.mktemp("models") / "llava"
    model.save_pretrained(folder)
    images = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        image_token=IMAGE,
        num_additional_image_tokens=1,
        chat_template=tiny.TEMPLATE,
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def shelf(llava: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoConfig, AutoTokenizer

    from llm_steer.artifact import Artifact, Description, ModelIdentity

    identity = ModelIdentity.of(
        AutoConfig.from_pretrained(llava), dtype=torch.float32, tokenizer=AutoTokenizer.from_pretrained(llava)
    )
    assert (identity.hidden_size, identity.num_layers) == (64, 2)
    folder = tmp_path_factory.mktemp("artifacts")
    for name, method, constants in (("calm", "constant_vector", {}), ("loop", "rebalance", CONSTANTS)):
        about = Description(
            method=method,
            model=identity,
            layer=0,
            site="after",
            positions="delimiter",
            sign="towards_overthinking",
            constants=constants,
        )
        vector = torch.randn(64, generator=torch.Generator().manual_seed(len(name)))
        Artifact(about, {"vector": 30 * vector / vector.norm()}).save(folder / name)
    return folder


STEERS: tuple[Any, ...] = (
    "off",
    {"name": "constant_vector", "artifact": "calm", "coefficient": 1.0},
    {"name": "constant_vector", "artifact": "calm", "coefficient": -2.0, "positions": "all"},
    {"name": "rebalance", "artifact": "loop", "strength": 2.0},
)


def prompts(image_id: int) -> list[tuple[list[int], bool]]:
    """With a place for an image, and without."""
    rng = random.Random(3)
    step = [*scenarios.words(rng, 4), scenarios.OPEN, BLANK]
    return [(step, False), ([scenarios.TALK[0], image_id, *step], True)]


def hugging_face(llava: Path, shelf: Path, picture: Path) -> tuple[list[Told], list[list[int]]]:
    """Tokens and traces of every prompt with every kind of steering; and what a plain hook says to the third kind."""
    from PIL import Image
    from safetensors.torch import load_file
    from transformers import AutoProcessor, LlavaForConditionalGeneration

    from llm_steer import steer

    processor = AutoProcessor.from_pretrained(llava)
    model = LlavaForConditionalGeneration.from_pretrained(llava, dtype=torch.float32).eval()
    steer(model, "off", tokenizer=processor.tokenizer)
    pixels = processor.image_processor(Image.open(picture), return_tensors="pt")["pixel_values"]
    image_id, patches = model.config.image_token_index, (SIDE // PATCH) ** 2
    vector = -2.0 * load_file(shelf / "calm" / "vectors.safetensors")["vector"]
    found: list[Told] = []
    hooked = []
    for prompt, shown in prompts(image_id):
        ids = torch.tensor([[token for one in prompt for token in [one] * (patches if one == image_id else 1)]])

        def generate(asked: Any, ids: torch.Tensor = ids, shown: bool = shown) -> list[int]:
            options = {"do_sample": False, "max_new_tokens": TOKENS, "eos_token_id": None, "pad_token_id": 0}
            seen = {"pixel_values": pixels} if shown else {}
            out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **seen, steer=[asked], **options)
            tokens: list[int] = out[0, ids.shape[1] :].tolist()
            return tokens

        for asked in STEERS:
            own = {**asked, "artifact": str(shelf / asked["artifact"])} if isinstance(asked, dict) else asked
            found.append((generate(own), model.steering.traces[0]))  # type: ignore[union-attr]
        layer = model.model.language_model.layers[0]
        handle = layer.register_forward_hook(lambda _module, _inputs, output: output + vector)
        hooked.append(generate("off"))
        handle.remove()
    return found, hooked


def test_the_language_models_layers_are_steered(engines: Engines, llava: Path, shelf: Path, tmp_path: Path) -> None:
    """With an image and without; the tower, of as many layers, is left alone."""
    from PIL import Image

    picture = tmp_path / "picture.png"
    Image.frombytes("RGB", (SIDE, SIDE), random.Random(1).randbytes(SIDE * SIDE * 3)).save(picture)
    wanted, hooked = hugging_face(llava, shelf, picture)
    assert [tokens for tokens, _ in wanted[2::4]] == hooked
    assert len({tuple(tokens) for tokens, _ in wanted}) == len(wanted), "all of them differ"
    named = [f"constant_vector:artifact={shelf / 'calm'},coefficient=0", f"rebalance:artifact={shelf / 'loop'},strength=0"]
    env = {"LLM_STEER_ARTIFACTS": str(shelf)}
    # vLLM's own LLaVA needs torchvision, which its CPU build does not work with.
    engine = engines.get(llava, one_process=True, env=env, logits_processors=named, model_impl="transformers")
    params = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
    image_id = json.loads((llava / "config.json").read_text())["image_token_index"]
    batch = [
        {
            "prompt_token_ids": prompt,
            "params": {**params, "extra_args": {"steer": asked}},
            **({"image": str(picture)} if shown else {}),
        }
        for prompt, shown in prompts(image_id)
        for asked in STEERS
    ]
    loops = 0
    for (output,), (tokens, trace), request in zip(engine.generate(batch), wanted, batch, strict=True):
        assert output["token_ids"] == tokens, request
        loops += check_loop(output["steering"], trace, TOKENS)
    assert loops == 2
