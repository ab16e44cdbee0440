"""Serve requests by continuous batching: chunked prefill and decoding share one paged cache and its calls.

    python examples/serve.py    64 requests in 16 slots on the GPU, decoding steps in a CUDA graph;
                                without a GPU in seconds, 5 requests in 2 slots of a smaller model

The model is that of ``generate.py``, with random weights. A request comes at an iteration, and waits for a slot and
for pages of all its rows. While a slot has a prompt left, an iteration is one packed call a layer: of up to ``--chunk``
rows, one for each slot that decodes and the rest chunks of prompts. Otherwise all slots decode in a CUDA graph, which
reads lengths and tables of pages at each replay. A slot without a request has the scratch page and a length of 0.

It prints tokens per second on the device, and compares every token of some requests with plain torch.
"""

import argparse
import itertools
import statistics
import time
from collections import deque
from dataclasses import dataclass, field

import torch
from generate import HEAD_DIM, VOCABULARY, Llama, compare, rotary_tables
from torch import Tensor

from cute_attn import attention_with_kvcache

SIZES = {
    "requests": (64, 5),
    "slots": (16, 2),
    "every": (2, 2),
    "layers": (4, 2),
    "width": (1024, 256),
    "heads_kv": (4, 2),
    "page": (16, 16),
    "longest": (500, 20),
    "wanted": (100, 8),
    "chunk": (256, 16),
    "compared": (2, 5),
}
"""Defaults on a GPU and on the CPU."""
SCRATCH = 0
"""The page of slots without a request."""


@dataclass
class Request:
    """A prompt and its progress.

    Attributes:
        wanted: tokens to generate.
        arrival: iteration of the server.
        done: rows of the prompt in the cache.
        found: generated tokens.
        pages: its pages, in order.
        seconds: from its arrival to its first token.
    """

    prompt: list[int]
    wanted: int
    arrival: int = 0
    done: int = 0
    found: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def decodes(self) -> bool:
        """The whole prompt is in the cache."""
        return self.done == len(self.prompt)


class Server:
    """Slots of running requests over one cache; ``tables`` and ``lengths`` are tensors that a CUDA graph reads."""

    def __init__(
        self, model: Llama, slots: int, rows: int, pages: int, page: int, chunk: int, dtype: torch.dtype
    ) -> None:
        """rows: of a request, at most. pages: of ``page`` rows each, for all requests."""
        self.model, self.page, self.chunk = model, page, chunk
        device = self.device = model.embedding.weight.device
        shape = (pages + 1, page, model.blocks[0].split[1], HEAD_DIM)
        # A row that is read before it is written would make a token of it.
        self.keys, self.values = (
            [torch.full(shape, torch.nan, device=device, dtype=dtype) for _ in model.blocks] for _ in range(2)
        )
        per_request = -(-rows // page)
        self.rotary = tuple(x.to(dtype) for x in rotary_tables(per_request * page, device))
        self.tables = torch.full((slots, per_request), SCRATCH, dtype=torch.int32, device=device)
        self.lengths, self.decodes = (torch.zeros(slots, dtype=torch.int32, device=device) for _ in range(2))
        self.tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        self.running: list[Request | None] = [None] * slots
        self.free = list(range(1, pages + 1))
        self.graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self.capture()

    # ---- on the device ----

    def logits(self, tokens: Tensor, **packed: object) -> Tensor:
        """tokens: (slots, 1), or packed (rows,). Each layer's call appends their keys and values, and attends."""
        given: dict = {"cache_seqlens": self.lengths, "page_table": self.tables, "causal": True, **packed}
        given |= {"rotary_cos": self.rotary[0], "rotary_sin": self.rotary[1], "rotary_interleaved": False}

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention_with_kvcache(q, self.keys[layer], self.values[layer], k=k, v=v, **given)

        return self.model(tokens, attend)

    def decode(self) -> None:
        """Decode one more token in each slot that decodes. Reads and writes only tensors on the device."""
        self.tokens.copy_(self.logits(self.tokens.unsqueeze(1))[:, 0].argmax(-1))
        self.lengths += self.decodes

    def capture(self) -> None:
        """Record a decoding step; no slot has a request yet, so that only the scratch page is written."""
        self.decode()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.decode()

    def mixed(self, rows: list[list[int]]) -> None:
        """Some rows of each slot, or none, in one packed call a layer. Rows behind them belong to no slot."""
        tokens = [token for own in rows for token in own]
        tokens = torch.tensor(tokens + [0] * (self.chunk - len(tokens)), device=self.device)
        ends = [0, *itertools.accumulate(map(len, rows))]
        starts = torch.tensor(ends, dtype=torch.int32, device=self.device)
        packed = {"cu_seqlens_q": starts, "cu_seqlens_k_new": starts, "max_seqlen_q": self.chunk}
        last = self.logits(tokens, **packed)[(starts[1:].long() - 1).clamp(min=0)].argmax(-1)
        self.tokens.copy_(torch.where(starts.diff() > 0, last, self.tokens))
        self.lengths += starts.diff()

    # ---- on the host ----

    def admit(self, waiting: deque[Request]) -> None:
        """Requests into free slots, in their order, while there are pages for all rows of the next one."""
        for slot, request in enumerate(self.running):
            if request is not None or not waiting:
                continue
            count = -(-(len(waiting[0].prompt) + waiting[0].wanted) // self.page)
            if count > len(self.free):
                return
            request = self.running[slot] = waiting.popleft()
            request.pages = [self.free.pop() for _ in range(count)]
            self.tables[slot, :count] = torch.tensor(request.pages, dtype=torch.int32, device=self.device)

    def release(self, slot: int, request: Request) -> None:
        """Free a finished request's slot and pages."""
        self.free += request.pages
        self.running[slot] = None
        self.tables[slot], self.lengths[slot], self.decodes[slot] = SCRATCH, 0, 0

    def step(self) -> None:
        """Run one iteration, and append its tokens to their requests."""
        prefills = any(r is not None and not r.decodes for r in self.running)
        rows, budget = [], self.chunk - sum(r is not None and r.decodes for r in self.running)
        for request in self.running:
            own = [] if request is None else request.found[-1:]
            if request is not None and not request.decodes:
                own = request.prompt[request.done :][:budget]
                budget, request.done = budget - len(own), request.done + len(own)
            rows.append(own)
        if prefills:
            self.mixed(rows)
        elif self.graph is not None:
            self.graph.replay()
        else:
            self.decode()
        for slot, token in enumerate(self.tokens.tolist()):
            request = self.running[slot]
            if request is None or not request.decodes:
                continue
            if not request.found:
                request.seconds, self.decodes[slot] = request.seconds + time.perf_counter(), 1
            request.found.append(token)
            if len(request.found) == request.wanted:
                self.release(slot, request)

    def serve(self, requests: list[Request]) -> float:
        """Serve all requests, in the order of their arrivals; returns seconds."""
        coming, waiting, iteration, start = deque(requests), deque[Request](), 0, time.perf_counter()
        while coming or waiting or any(self.running):
            while coming and coming[0].arrival <= iteration:
                waiting.append(coming.popleft())
                waiting[-1].seconds = -time.perf_counter()
            self.admit(waiting)
            if any(self.running):
                self.step()
            iteration += 1
        return time.perf_counter() - start


@torch.no_grad()
def main() -> None:
    """Serve and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, choices=("cuda", "cpu"))
    parser.add_argument("--seed", type=int, default=0)
    for name, (on_gpu, on_cpu) in SIZES.items():
        text = f"by default {on_gpu}, on the CPU {on_cpu}"
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=text)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is 'cuda', and there is no GPU; accepted here: --device cpu")
    for name, defaults in SIZES.items():
        if getattr(options, name) is None:
            setattr(options, name, defaults[options.device == "cpu"])
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; accepted: 1 or more")
    if options.chunk <= options.slots:
        parser.error(f"--chunk is {options.chunk}; accepted: more than --slots, {options.slots}")
    device, dtype = options.device, torch.bfloat16 if options.device == "cuda" else torch.float32
    sizes = (options.layers, options.width, options.heads_kv, options.seed)
    exact, model = Llama(*sizes).to(device), Llama(*sizes).to(device, dtype)
    exact.load_state_dict(model.state_dict())  # the same weights, rounded to 16 bits
    draw = torch.Generator().manual_seed(options.seed)

    def drawn(i: int) -> Request:
        length, wanted = (
            int(torch.randint(1, n + 1, (), generator=draw)) for n in (options.longest, options.wanted)
        )
        prompt = torch.randint(VOCABULARY, (length,), generator=draw).tolist()
        return Request(prompt, wanted, i * options.every)

    requests, rows = [drawn(i) for i in range(options.requests)], options.longest + options.wanted
    pages = max(options.slots * rows // 2, rows) // options.page + 1  # half of what all slots could have
    server = Server(model, options.slots, rows, pages, options.page, options.chunk, dtype)
    server.serve([Request([1] * (options.slots + 1), 2)])  # compiles
    seconds = server.serve(requests)
    some = requests[: options.compared]
    prompts, found = ([torch.tensor(getattr(r, x), device=device) for r in some] for x in ("prompt", "found"))
    equal, worst = compare(exact, prompts, found, allowed=0.15 if dtype == torch.bfloat16 else 0.001)
    where = torch.cuda.get_device_name() if device == "cuda" else "the CPU"
    total, given = sum(len(r.found) for r in requests), sum(len(r.prompt) for r in requests)
    print(
        f"{options.requests} requests of {given} tokens, {total} generated, on {where}: {total / seconds:.0f} tokens/s"
    )
    print(f"first tokens after {1e3 * statistics.median(r.seconds for r in requests):.1f} ms (median)")
    print(f"{equal} of {sum(map(len, found))} compared tokens are plain torch's most likely ones,")
    print(f"others at most {worst:.4f} standard deviations of the logits behind them")


if __name__ == "__main__":
    main()
