"""A vLLM engine in a process of its own, driven by lines of JSON on stdin and stdout (see ``engine_client``)."""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any


class Worker:
    """What a client may call: the methods without an underscore."""

    llm: Any = None
    preemptions = 0

    def make(self, **engine_args: Any) -> dict[str, Any]:
        from vllm import LLM
        from vllm.v1.core.sched.scheduler import Scheduler

        preempt = Scheduler._preempt_request

        def _preempt_request(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            self.preemptions += 1
            return preempt(scheduler, *args, **kwargs)

        Scheduler._preempt_request = _preempt_request
        self.llm = LLM(**engine_args)
        config = self.llm.llm_engine.vllm_config
        return {
            "v2": config.use_v2_model_runner,
            "async": config.scheduler_config.async_scheduling,
            "steering_loaded": any(name.split(".")[0] == "llm_steer" for name in sys.modules),
            "processors": config.model_config.logits_processors,
            "hash": config.compute_hash(),
        }

    def generate(self, requests: list[dict[str, Any]], unsteered: bool = False) -> list[list[dict[str, Any]]]:
        """One list of outputs for each request."""
        from contextlib import nullcontext

        outside: Any = nullcontext
        if unsteered:
            from llm_steer.hosts.vllm.admission import unsteered as outside
        prompts = [_prompt(r) for r in requests]
        adapters = [_adapter(r["lora"]) if "lora" in r else None for r in requests]
        with outside():
            finished = self.llm.generate(
                prompts,
                [_params(r.get("params")) for r in requests],
                use_tqdm=False,
                lora_request=adapters if any(adapters) else None,
            )
        told = [[_output(o) for o in request.outputs] for request in finished]
        for request, outputs in zip(finished, told, strict=True):
            if request.prompt_logprobs is not None:  # of the prompt's own tokens, the first aside
                steps = zip(request.prompt_token_ids[1:], request.prompt_logprobs[1:], strict=True)
                outputs[0]["prompt_logprobs"] = [step[token].logprob for token, step in steps]
        return told

    def starts(self, cases: list[dict[str, Any]], **engine_args: Any) -> list[str]:
        """Why engines with these further arguments do not start."""
        from vllm import LLM

        reasons = []
        for case in cases:
            try:
                LLM(**{**engine_args, **case})
            except Exception as error:
                reasons.append(f"{type(error).__name__}: {error}")
            else:
                reasons.append("it starts")
        return reasons

    def compiled(self, cases: list[dict[str, Any]], **engine_args: Any) -> list[list[str]]:
        """How engines with these further arguments would compile: names in vLLM's caches, compilation and graph mode."""
        from vllm.engine.arg_utils import EngineArgs

        configs = [EngineArgs(**{**engine_args, **case}).create_engine_config() for case in cases]
        modes = [(c.compilation_config.mode, c.compilation_config.cudagraph_mode) for c in configs]
        return [[config.compute_hash(), *map(str, mode)] for config, mode in zip(configs, modes, strict=True)]

    def sleep(self) -> None:
        """Deeply, and wake up: the weights are lost."""
        self.llm.sleep(level=2)
        self.llm.wake_up()

    def reload_weights(self) -> None:
        self.llm.collective_rpc("reload_weights")

    def stream_input(self, prompt_token_ids: list[int], **params: Any) -> None:
        """A request whose prompt may go on, as far as the front end takes it."""
        processor, tasks = self.llm.llm_engine.input_processor, ("generate",)
        prompt = {"type": "token", "prompt_token_ids": prompt_token_ids}
        processor.process_inputs("stream", prompt, _params(params), supported_tasks=tasks, resumable=True)

    def cached(self, prompt_token_ids: list[int], **params: Any) -> dict[str, Any]:
        """One request with the log-probabilities of all tokens, and how many tokens of its prompt came from the cache."""
        made = _params({**params, "logprobs": -1})
        (request,) = self.llm.generate([{"prompt_token_ids": prompt_token_ids}], made, use_tqdm=False)
        return {"cached": request.num_cached_tokens, "outputs": [_output(o) for o in request.outputs]}

    def reset_prefix_cache(self) -> None:
        assert self.llm.reset_prefix_cache()

    def beam_search(self, prompts: list[Any], unsteered: bool = False, **params: Any) -> list[list[list[int]]]:
        from contextlib import nullcontext

        from vllm.sampling_params import BeamSearchParams

        outside: Any = nullcontext
        if unsteered:
            from llm_steer.hosts.vllm.admission import unsteered as outside
        with outside():
            found = self.llm.beam_search(prompts, BeamSearchParams(**params))
        return [[s.tokens for s in f.sequences] for f in found]

    def play(self, script: list[dict[str, Any]]) -> dict[str, Any]:
        """Add and abort requests step by step, until all are done.

        Args:
            script: for each step what is added (``{"id", "prompt_token_ids", "params"}``) and aborted before it.
        """
        from vllm.sampling_params import RequestOutputKind

        engine = self.llm.llm_engine
        before, steps, tokens, widest = self.preemptions, 0, {}, 0
        while engine.has_unfinished_requests() or steps < len(script):
            todo = script[steps] if steps < len(script) else {}
            if aborted := todo.get("abort"):
                engine.abort_request(aborted)
            for request in todo.get("add", ()):
                params = _params({**request["params"], "output_kind": RequestOutputKind.CUMULATIVE})
                engine.add_request(request["id"], {"prompt_token_ids": request["prompt_token_ids"]}, params)
            outputs = engine.step()
            widest = max(widest, len(outputs))
            for output in outputs:
                tokens[output.request_id] = list(output.outputs[0].token_ids)
            steps += 1
        return {"tokens": tokens, "preemptions": self.preemptions - before, "steps": steps, "widest": widest}

    def add_to_core(self, prompt_token_ids: list[int], **params: Any) -> None:
        """Hand a request to the engine core past the front end."""
        from vllm.v1.engine import EngineCoreRequest

        engine = self.llm.llm_engine
        made = _params(params)
        made.update_from_generation_config({}, 2)
        fields = {
            "request_id": "bypass",
            "prompt_token_ids": prompt_token_ids,
            "mm_features": None,
            "sampling_params": made,
            "pooling_params": None,
            "arrival_time": 0.0,
            "lora_request": None,
            "cache_salt": None,
            "data_parallel_rank": None,
        }
        engine.engine_core.add_request(EngineCoreRequest(**fields))
        for _ in range(50):
            outputs = engine.engine_core.get_output().outputs
            if any(o.finish_reason is not None for o in outputs):
                break


def _params(fields: dict[str, Any] | None) -> Any:
    from vllm import SamplingParams

    fields = dict(fields or {})
    if bias := fields.get("logit_bias"):
        fields["logit_bias"] = {int(token): value for token, value in bias.items()}
    if choices := fields.pop("choices", None):
        from vllm.sampling_params import StructuredOutputsParams

        fields["structured_outputs"] = StructuredOutputsParams(choice=choices)
    return SamplingParams(**fields)


def _prompt(request: dict[str, Any]) -> Any:
    if "prompt" in request:
        return request["prompt"]
    prompt = {"prompt_token_ids": request["prompt_token_ids"]}
    if "image" in request:
        from PIL import Image

        prompt["multi_modal_data"] = {"image": Image.open(request["image"]).convert("RGB")}
    return prompt


def _adapter(folder: str) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest("adapter", 1, folder)


def _output(output: Any) -> dict[str, Any]:
    result = {
        "token_ids": list(output.token_ids),
        "text": output.text,
        "finish_reason": output.finish_reason,
        "steering": getattr(output, "steering", None),
    }
    if output.logprobs is not None:
        result["logprobs"] = [sorted((token, entry.logprob) for token, entry in step.items()) for step in output.logprobs]
    return result


def main() -> None:
    # vLLM and the libraries under it print to stdout: what they print goes to stderr.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker()
    for line in sys.stdin:
        call, arguments = json.loads(line)
        try:
            reply: Any = {"result": getattr(worker, call)(**arguments)}
        except Exception as error:
            traceback.print_exc()
            reply = {"error": type(error).__name__, "message": str(error)}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
