"""A stand-in for vLLM on machines without it: Transformers and PEFT sample token by token, with adapters as vLLM reads
them from their folders, and return tokens, log-probabilities and experts as vLLM does; in this process, or over
HTTP."""

import base64
import contextlib
import io
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import numpy
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import sonicmoe_hf


class LoRARequest(SimpleNamespace):
    """vLLM's, of which a name, a number and a path tell adapters apart."""

    def __init__(self, lora_name, lora_int_id, lora_path, is_3d_lora_weight=False):
        super().__init__(
            lora_name=lora_name, lora_int_id=lora_int_id, lora_path=lora_path, is_3d_lora_weight=is_3d_lora_weight
        )


class SamplingParams(SimpleNamespace):
    """vLLM's."""

    def __init__(self, **options):
        super().__init__(**{"n": 1, "logprobs": 0, **options})


class StandInLLM:
    """vLLM's LLM. options: what it was started with. loaded, removed: names of adapters, in their
    order. slept: levels."""

    made: ClassVar[list] = []

    def __init__(self, model, **options):
        self.options, self.folder = {"model": model, **options}, Path(model)
        self.model = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, options.get("dtype", "float32"))
        ).eval()
        sonicmoe_hf.patch_model(self.model)
        self.base, self.eos = self.model, self.model.config.eos_token_id
        self.loaded, self.removed, self.slept, self.requests = [], [], [], {}
        self.generator = torch.Generator().manual_seed(int(options.get("seed", 0)))
        self.llm_engine = SimpleNamespace(
            add_lora=self.add_lora,
            remove_lora=self.remove_lora,
            model_config=SimpleNamespace(max_model_len=options.get("max_model_len") or 128),
        )
        StandInLLM.made.append(self)

    def add_lora(self, request):
        name = request.lora_name
        assert name not in self.loaded, "weights under a name that was seen would be served with its cached keys"
        source = Path(request.lora_path)
        if request.is_3d_lora_weight:
            assert self.options.get("enable_mixed_moe_lora_format")
            folder = source
        else:
            folder = source.with_name(f"read-{name}")
            sonicmoe_hf.convert_adapter(source, folder, "hub", trained_on=self.folder)
        config = json.loads((source / "adapter_config.json").read_text())
        assert config["r"] <= self.options["max_lora_rank"]
        if isinstance(self.model, PeftModel):
            self.model.load_adapter(folder, adapter_name=name.replace(".", "_"))
        else:
            self.model = PeftModel.from_pretrained(self.model, folder, adapter_name=name.replace(".", "_"))
        if folder is not source:
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
        self.loaded.append(name)
        self.requests[request.lora_int_id] = name
        return True

    def remove_lora(self, number):
        self.removed.append(self.requests.pop(number))
        return True

    def sleep(self, level):
        self.slept.append(level)

    def wake_up(self, tags=None):
        pass

    def generate(self, prompts, sampling_params=None, use_tqdm=True, lora_request=None):
        outputs = []
        with self._adapter(lora_request):
            for prompt in prompts:
                ids = list(prompt["prompt_token_ids"])
                completions = [self._complete(ids, sampling_params) for _ in range(sampling_params.n)]
                outputs.append(SimpleNamespace(prompt_token_ids=ids, outputs=completions))
        return outputs

    @contextlib.contextmanager
    def _adapter(self, request):
        if request is None:
            assert not isinstance(self.model, PeftModel), "a rollout from the base alone"
            yield
            return
        self.model.set_adapter(request.lora_name.replace(".", "_"))
        yield

    @torch.no_grad()
    def _complete(self, prompt, parameters, forced=()):
        """Sample a completion; or give it `forced`, with what the model says of it."""
        ids = [*prompt, *forced]
        while not forced and len(ids) - len(prompt) < parameters.max_tokens and (ids == prompt or ids[-1] != self.eos):
            logits = self.model(input_ids=torch.tensor([ids])).logits[0, -1].float()
            ids.append(int((logits / parameters.temperature).softmax(-1).multinomial(1, generator=self.generator)))
        with sonicmoe_hf.record_routing(self.model) as routing:
            logits = self.model(input_ids=torch.tensor([ids[:-1]])).logits[0].float() / parameters.temperature
        logs = logits.log_softmax(-1)[len(prompt) - 1 :]
        completion = ids[len(prompt) :]
        logprobs = [{t: SimpleNamespace(logprob=float(row[t]), rank=1)} for t, row in zip(completion, logs)]
        experts = None
        if self.options.get("enable_return_routed_experts"):
            experts = routing.tensors()[0].transpose(0, 1).to(torch.uint8).numpy()
        return SimpleNamespace(token_ids=completion, logprobs=logprobs, routed_experts=experts)


def install(monkeypatch):
    """Have TRL and sonicmoe_hf find the stand-in where vLLM would be."""
    from trl.generation import vllm_client, vllm_generation

    request = ModuleType("vllm.lora.request")
    request.LoRARequest = LoRARequest
    for name, module in {
        "vllm": ModuleType("vllm"),
        "vllm.lora": ModuleType("vllm.lora"),
        request.__name__: request,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    for module in (vllm_client, vllm_generation):
        monkeypatch.setattr(module, "is_vllm_available", lambda *args, **options: True)
    monkeypatch.setattr(vllm_generation, "LLM", StandInLLM, raising=False)
    monkeypatch.setattr(vllm_generation, "SamplingParams", SamplingParams, raising=False)
    monkeypatch.setattr(StandInLLM, "made", [])


def server_info(folder, **changes):
    """Answer as `vllm serve` does about itself, started as its command line should be."""
    info = {
        "model_config": {"model": str(folder), "dtype": "torch.float32", "logprobs_mode": "processed_logprobs"},
        "lora_config": {"max_lora_rank": 8, "max_loras": 2, "enable_mixed_moe_lora_format": True},
        "aux_output_config": {"enable_return_routed_experts": True},
        "parallel_config": {"data_parallel_size": 1},
    }
    for name, value in changes.items():
        info[name] = {**info[name], **value} if isinstance(value, dict) else value
    return info


@contextlib.contextmanager
def serving(folder, has_runtime_loading=True, is_in_development=True, sees_folders=True, **changes):
    """Serve the stand-in as `vllm serve` does; yields an object with its url and its llm."""
    info = server_info(folder, **changes)
    lora, outputs = info["lora_config"] or {}, info["aux_output_config"]
    llm = StandInLLM(str(folder), **{**lora, **outputs, "max_lora_rank": lora.get("max_lora_rank", 0)})
    requests: dict[str, LoRARequest] = {}
    state = SimpleNamespace(llm=llm, requests=requests, url="")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args):
            pass

        def _send(self, status, body):
            data = (body if isinstance(body, str) else json.dumps(body)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            path = self.path.partition("?")[0]
            if path == "/server_info" and is_in_development:
                self._send(200, {"vllm_config": info})
            elif path == "/v1/models":
                self._send(200, {"data": [{"id": str(folder)}, *({"id": name} for name in requests)]})
            elif path == "/health":
                self._send(200, {})
            else:
                self._send(404, {"detail": "Not Found"})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}")
            if self.path.partition("?")[0] in ("/pause", "/resume"):
                self._send(200, {})
            elif self.path == "/v1/completions":
                self._send(200, {"choices": complete(body)})
            elif self.path == "/inference/v1/generate":  # for prompts with images
                self._send(
                    200, {"choices": complete(body | body["sampling_params"] | {"prompt": [body["token_ids"]]})}
                )
            elif self.path == "/v1/load_lora_adapter" and has_runtime_loading:
                if not sees_folders:
                    self._send(404, {"error": {"message": f"No adapter found for {body['lora_path']}"}})
                    return
                request = LoRARequest(
                    body["lora_name"], len(llm.loaded) + 1, body["lora_path"], body.get("is_3d_lora_weight")
                )
                if request.lora_name in requests:
                    self._send(400, {"error": {"message": "has already been loaded"}})
                    return
                llm.add_lora(request)
                requests[request.lora_name] = request
                self._send(200, "Success")
            elif self.path == "/v1/unload_lora_adapter" and has_runtime_loading:
                llm.remove_lora(requests.pop(body["lora_name"]).lora_int_id)
                self._send(200, "Success")
            else:
                self._send(404, {"detail": "Not Found"})

    def complete(body):
        parameters = SamplingParams(**{name: body[name] for name in ("n", "temperature", "max_tokens", "logprobs")})
        prompts = [{"prompt_token_ids": ids} for ids in body["prompt"]]
        choices = []
        for output in llm.generate(prompts, parameters, lora_request=requests.get(body["model"])):
            for each in output.outputs:
                values = [next(iter(step.values())).logprob for step in each.logprobs]
                names = [f"token_id:{token}" for token in each.token_ids]
                tops = [{name: value} for name, value in zip(names, values)]
                logprobs = {"tokens": names, "token_logprobs": values, "top_logprobs": tops}
                choices.append({"prompt_token_ids": output.prompt_token_ids, "token_ids": each.token_ids})
                choices[-1] |= {"logprobs": logprobs, "routed_experts": _as_text(each.routed_experts)}
        return choices

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()


def _as_text(experts):
    if experts is None:
        return None
    buffer = io.BytesIO()
    numpy.save(buffer, experts)
    return base64.b64encode(buffer.getvalue()).decode()
