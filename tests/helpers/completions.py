"""A server on this machine that answers as vLLM, SGLang and `transformers serve` do, with what
models of the test compute."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

FORMS = ("prompts", "generated", "text")  # the most telling that it has, under an adapter
ADAPTER = "tuned"


class FakeServer:
    """A server of two models, base and tuned.

    form: of FORMS. noise: standard deviation of that in every log-probability. listed: whether the adapter is in the list
    of models; None: there is no list. hidden_tokens: how many more it says that it generated than it did.
    """

    def __init__(self, base, tuned, words, form="prompts", noise=0.0, listed=True, hidden_tokens=0):
        self.models, self.words, self.form, self.noise = {"base": base, ADAPTER: tuned}, words, form, noise
        self.has_list = listed is not None
        self.hidden_tokens = hidden_tokens
        self.generator = torch.Generator().manual_seed(0)
        self.listed = {"base": None, **({} if listed is False else {ADAPTER: "base"})}

    def answer(self, path, body):
        """Get (status, JSON) of a request."""
        if path == "/v1/models" and self.has_list:
            return 200, {"data": [{"id": name, "parent": parent} for name, parent in self.listed.items()]}
        if body is None:
            return 500, {"error": "Internal Server Error"}
        if body["model"] not in self.listed:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        model, prompt = self.models[body["model"]], body["prompt"]
        if isinstance(prompt, str) != (self.form == "text"):
            return 400, {"detail": "prompt must be a string"}
        if body.get("echo"):
            if self.form != "prompts":
                return 500, {"error": {"message": "no prompt_logprobs with LoRA"}}
            values = self._log_probabilities(model, prompt)
            return 200, {"choices": [{"logprobs": {"token_logprobs": [None, *values, -1.0]}}]}
        ids = self.words(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        whole = model.generate(torch.tensor([ids]), max_new_tokens=body["max_tokens"], do_sample=False)[0].tolist()
        choice = {"text": self.words.decode(whole[len(ids) :])}
        if self.form == "generated":
            values = self._log_probabilities(model, whole)[len(ids) - 1 :]
            choice |= {"token_ids": whole[len(ids) :], "logprobs": {"token_logprobs": values}}
        return 200, {"choices": [choice], "usage": {"completion_tokens": len(whole) - len(ids) + self.hidden_tokens}}

    @torch.no_grad()
    def _log_probabilities(self, model, ids):
        ids = torch.tensor(ids)
        expected = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        return (expected + self.noise * torch.randn(expected.shape, generator=self.generator)).tolist()


@contextmanager
def serve(fake):
    """Serve inside the block, on a free port; yields the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self._reply(None)

        def do_POST(self):
            self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _reply(self, body):
            status, reply = fake.answer(self.path, body)
            data = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
