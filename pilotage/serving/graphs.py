"""One graph a bucket: its input buffers, its compiled form, what ran in it and how long it took to get.

A graph is the whole forward, captured once (`fullgraph`, no dynamic shapes) and compiled ahead of time by inductor,
each distinct layer once (`pieces`). What runs later is that compiled function and nothing else: there is no guard that
could fail and no tracer that could recompile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from pilotage import functional
from pilotage.core.config import TargetConfig
from pilotage.core.errors import StorageError, Unsupported
from pilotage.core.progress import track
from pilotage.serving import buckets, compile_mode, compiler_options, kv, parallel_compile, pieces, targets
from pilotage.serving.batch import Forward, StepInputs
from pilotage.serving.buckets import Key, Reach
from pilotage.serving.compile_cache import CompileCache, fingerprint, root

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from pilotage.probe.plan import Taps


class Graphs:
    """The graphs of a model.

    Attributes:
        inputs: of each graph.
        table: for each compiled graph {"kind", "size", "name", "seconds", "cached"}, and "tapped" for one with taps.
        taps: what the graphs record and replace, from the next run on; None for graphs without taps.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: torch.nn.Module,
        kv_cache_config: KVCacheConfig,
        caches: Mapping[str, Sequence[Tensor]],
        *,
        token_buckets: Sequence[int],
        seq_buckets: Sequence[int],
        prefill_seqs: int,
        tokens_per_req: int = 1,
        samples: bool = True,
    ) -> None:
        """Prepare the inputs; nothing is compiled yet.

        Args:
            vllm_config, model, kv_cache_config, caches: as for the runner.
            token_buckets: prefill graphs, in tokens.
            seq_buckets: decode graphs, in requests.
            prefill_seqs: requests that share a prefill graph.
            tokens_per_req: most tokens of a request in a decode graph: its last one and the drafts.
            samples: whether the graphs sample where the configuration says so.
        """
        self.vllm_config, self.model, self.caches = vllm_config, model, caches
        self.eager = vllm_config.model_config.enforce_eager
        groups = self.groups = kv.layer_groups(kv_cache_config, vllm_config.model_config.max_model_len)
        self.prefill_seqs = prefill_seqs
        self.target, self.device = targets.select(), next(model.parameters()).device
        self.rank = torch.tensor(vllm_config.parallel_config.rank, dtype=torch.int32, device=self.device)
        model_config = vllm_config.model_config
        target = TargetConfig.from_additional_config(vllm_config.additional_config)
        self.lazy = target.lazy_compile
        self.reach = Reach.of(target, model_config.max_model_len, max(group.block_size for group in groups))
        self.inputs: dict[Key, StepInputs] = {}
        for size in token_buckets:
            for key in self.reach.keys("prefill", size):
                self.inputs[key] = StepInputs("prefill", size, num_rows=prefill_seqs, groups=groups, key=key)
        for size in seq_buckets:
            for key in self.reach.keys("decode", size):
                self.inputs[key] = StepInputs(
                    "decode",
                    size * tokens_per_req,
                    num_rows=size,
                    groups=groups,
                    decode_token_threshold=tokens_per_req,
                    key=key,
                )
        for inputs in self.inputs.values():
            if samples and target.on_device_sampling_config is not None:
                inputs.add_sampling()
            if model_config.enable_prompt_embeds:
                inputs.add_embeds(model_config.get_hidden_size(), model_config.dtype)
            if (width := getattr(model, "hidden_states_width", None)) is not None:
                inputs.add_hidden_states(int(width), model_config.dtype)
            if self.target.staged:
                inputs.on(self.device)
        self._aux_layers: tuple[int, ...] = getattr(model, "aux_hidden_state_layers", ())
        self.token_buckets, self.seq_buckets = tuple(token_buckets), tuple(seq_buckets)
        self.tokens_per_req, self.samples = tokens_per_req, samples
        self.compiled: dict[tuple[str, Key], Callable[..., tuple[Tensor, Tensor]]] = {}
        self.taps: Taps | None = None
        self.exact = target.exact_taps
        self._options = {**compiler_options.options(), **({"emulate_precision_casts": True} if self.exact else {})}
        self.table: list[dict[str, Any]] = []
        self._receipts: list[dict[str, Any]] = []
        functional.reset_receipt()

    def inputs_for(self, forward: Forward, num_computed: npt.NDArray[np.int32]) -> StepInputs:
        """Return the inputs of the smallest graph that holds a forward.

        Args:
            forward: rows and token counts.
            num_computed: as for `StepInputs.fill`.

        Raises:
            ConfigError: it is over the largest bucket.
        """
        if forward.kind == "decode":
            size = buckets.pick(self.seq_buckets, len(forward.rows), "num_seqs_buckets")
        else:
            size = buckets.pick(self.token_buckets, sum(forward.num_tokens), "num_batched_tokens_buckets")
        before = [int(num_computed[row]) for row in forward.rows]
        longest = max(done + count for done, count in zip(before, forward.num_tokens, strict=True))
        return self.inputs[self.reach.pick(forward.kind, size, cached=max(before), longest=longest)]

    def warm_up(self) -> float:
        """Compile or load every graph and run it once on padding; returns the seconds spent.

        With `enforce_eager` nothing is compiled. With `lazy_compile` a graph is compiled when a batch first needs it.

        Raises:
            Unavailable: compiling is switched off and a graph is not in the cache.
        """
        if self.lazy:
            return 0.0
        # Small graphs first: a mistake in the model shows within seconds.
        return self.prepare(sorted(self.inputs, key=lambda key: key.size))

    def prepare(self, keys: Sequence[Key]) -> float:
        """Compile or load these graphs, with the taps of now, unless they are there; returns the seconds spent.

        Raises:
            Unavailable: as for `warm_up`.
        """
        start = time.perf_counter()
        keys = [key for key in keys if (self._variant(), key) not in self.compiled]
        if self.eager or not keys:
            return 0.0
        if self.target.compiler is not None:
            for key in track(keys, f"Compiling {len(keys)} graphs with {self.target.compiler}"):
                self._prepare_elsewhere(key, self.target.compiler)
            return time.perf_counter() - start
        quiet = self.vllm_config.parallel_config.rank != 0
        with self._cache() as cache:
            missing = [key for key in keys if not cache.has(key.name)]
            if missing and not compile_mode.compiles():
                raise compile_mode.not_compiled([key.name for key in missing], cache.directory)
            took = self._compile_at_once(missing, cache)
            left = len(missing) - len(took)
            what = f"Compiling {left} of {len(keys)} graphs" if left else f"Loading {len(keys)} compiled graphs"
            for key in keys if quiet else track(keys, what):
                self._prepare(key, cache, compiled_in=took.get(key))
        return time.perf_counter() - start

    def _compile_at_once(self, missing: Sequence[Key], cache: CompileCache) -> dict[Key, float]:
        """Compile graphs into the cache, several at a time; returns the seconds of those that are there now."""
        took: dict[Key, float] = {}
        copies = parallel_compile.processes(len(missing), stated=compiler_options.workers())
        if copies < 2 or self.vllm_config.parallel_config.world_size > 1:  # several ranks already fill the cores
            return took
        compiler_options.require()
        compiler_options.load()
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        columns = (
            TextColumn(f"Compiling {len(missing)} graphs"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )

        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task("", total=len(missing))

            def finished(key: Key, seconds: float) -> None:
                took[key] = seconds
                progress.advance(task)

            parallel_compile.compile_in_copies(
                missing[::-1], lambda key: self._store(key, cache), copies=copies, finished=finished
            )
        return {key: seconds for key, seconds in took.items() if cache.has(key.name)}

    def _store(self, key: Key, cache: CompileCache) -> None:
        functional.reset_receipt()
        graph = self._compile(self.inputs[key])
        cache.save(key.name, graph, {"receipt": functional.receipt()})

    def _cache(self) -> CompileCache:
        target = TargetConfig.from_additional_config(self.vllm_config.additional_config)
        # The buckets in use do not matter to a graph; its own rows do, and are part of its name.
        # Taps are counted as they are, not as they were asked for.
        settings = {
            key: value
            for key, value in dataclasses.asdict(target).items()
            if not key.endswith("_buckets") and key not in ("tensor_capture", "tensor_replacement", "lazy_compile")
        }
        extra = {
            "target": settings,
            **({"taps": self.taps.signature()} if self.taps is not None else {}),
            "groups": [dataclasses.asdict(group) for group in self.groups],
            **({"tokens_per_req": self.tokens_per_req} if self.tokens_per_req > 1 else {}),
            **({} if self.samples else {"samples": False}),
            **({"aux_hidden_state_layers": self._aux_layers} if self._aux_layers else {}),
            "prefill_rows": [self.prefill_seqs],
            **({"prompt_embeds": True} if self.vllm_config.model_config.enable_prompt_embeds else {}),
            "options": self._options,
            "kernels": functional.load_kernels(),  # a stored graph calls them
        }
        return CompileCache(root() / fingerprint(self.vllm_config, self.model, self.caches, extra))

    def _prepare(self, key: Key, cache: CompileCache, *, compiled_in: float | None = None) -> None:
        """Load or compile a graph and run it once; `compiled_in` are the seconds it took to compile just before."""
        start = time.perf_counter()
        found = cache.load(key.name)
        if found is None:
            if not compile_mode.compiles():
                raise compile_mode.not_compiled([key.name], cache.directory)
            functional.reset_receipt()
            graph, notes = self._compile(self.inputs[key]), {"receipt": functional.receipt()}
            cache.save(key.name, graph, notes)
        else:
            graph, notes = found
        # Straight to the compiled function: its inputs have one shape, and the cache vouches for the rest.
        self.compiled[self._variant(), key] = functools.partial(graph.fn, self.model)
        if not compile_mode.compiles_only():
            self.inputs[key].clear()
            self.run(self.inputs[key])
        seconds = time.perf_counter() - start + (compiled_in or 0.0)
        self._ready(key, notes["receipt"], seconds, cached=found is not None and compiled_in is None)

    def _prepare_elsewhere(self, key: Key, compiler: str) -> None:
        """Compile a graph with a backend of torch.compile that has a cache of its own, by running it once."""
        if not compile_mode.compiles():
            raise Unsupported(
                "its cache does not say what is in it, so that it cannot be kept from compiling",
                where=f"compiler {compiler}",
                do="unset PILOTAGE_DISABLE_WARMUP_COMPILE",
            )
        start = time.perf_counter()
        functional.reset_receipt()
        compiled = torch.compile(type(self.model).forward, backend=compiler, fullgraph=True, dynamic=False)
        self.compiled[self._variant(), key] = functools.partial(compiled, self.model)
        self.inputs[key].clear()
        self.run(self.inputs[key])
        self._ready(key, functional.receipt(), time.perf_counter() - start, cached=False)

    def _ready(self, key: Key, receipt: dict[str, Any], seconds: float, *, cached: bool) -> None:
        """Note what is in a graph and how long it took to get."""
        self._receipts.append(receipt)
        functional.reset_receipt()
        self.table.append(
            {
                "kind": key.kind,
                "size": key.size,
                "name": key.name,
                "seconds": round(seconds, 3),
                "cached": cached,
                **({"tapped": True} if self.taps is not None else {}),
            }
        )

    def _compile(self, inputs: StepInputs) -> Any:
        import torch._dynamo.config as dynamo_config
        import torch._dynamo.exc as dynamo_errors
        import torch._inductor.exc as inductor_errors

        compiler_options.require()
        compiled = torch.compile(
            type(self.model).forward,
            fullgraph=True,
            dynamic=False,
            backend=lambda graph, _examples: pieces.compile_in_pieces(graph, self._options),
            options={"guard_filter_fn": compiler_options.no_guards},
        )
        exact = compiler_options.nothing_folded() if self.exact else contextlib.nullcontext()
        try:
            with (
                torch.no_grad(),
                dynamo_config.patch(enable_aot_compile=True),
                self._tapped(inputs, hooks=True),
                exact,
            ):
                return compiled.aot_compile(((self.model,), self._arguments(inputs)))
        except inductor_errors.InductorError as error:
            inner = error.inner_exception
            if not isinstance(inner, OSError) or inner.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise StorageError(
                f"a graph cannot be compiled there ({inner.strerror})",
                where=str(root()),
                do="make room, or name another directory with PILOTAGE_COMPILE_CACHE",
            ) from error
        except dynamo_errors.Unsupported as error:
            raise Unsupported(
                f"the forward cannot be captured as one graph: {str(error).splitlines()[0]}",
                where=type(self.model).__name__,
                do="change the model, or serve it with enforce_eager",
            ) from error

    def _variant(self) -> str:
        """Name the taps of now among those that graphs were compiled with."""
        return "" if self.taps is None else json.dumps(self.taps.signature())

    def _tapped(self, inputs: StepInputs, *, hooks: bool) -> AbstractContextManager[None]:
        if self.taps is None:
            return contextlib.nullcontext()
        return self.taps.active(inputs.size, inputs.num_sampled, hooks=hooks)

    @contextlib.contextmanager
    def untapped(self) -> Iterator[None]:
        """Run the graphs without taps inside the block."""
        taps, self.taps = self.taps, None
        try:
            yield
        finally:
            self.taps = taps

    def _arguments(self, inputs: StepInputs) -> dict[str, Any]:
        return {**inputs.arguments(), "rank": self.rank, "return_hidden": True}

    @torch.no_grad()
    def run(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Run the graph of `inputs` on what they hold now.

        Returns:
            Logits [R, V] of the sampling positions, in host memory, and hidden states [T, D] after the final norm. What
            the graph sampled is in `inputs.sampled_tokens`.
        """
        key = inputs.key
        forward = self.model if self.eager else self.compiled.get((self._variant(), key))
        if forward is None:
            held = [tensor.clone() for tensor in inputs.tensors()]  # compiling runs the graph on padding
            self.prepare([key])
            for tensor, value in zip(inputs.tensors(), held, strict=True):
                tensor.copy_(value)
            forward = self.compiled[self._variant(), key]
        inputs.send()
        with self._tapped(inputs, hooks=self.eager):
            found = list(forward(**self._arguments(inputs)))
        inputs.aux_hidden_states = found.pop() if self._aux_layers else None
        *tokens, logits, hidden = found
        inputs.sampled_tokens = tokens[0] if tokens else None
        return logits.to("cpu"), hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits [*, V] of rows that `run` returned, in host memory."""
        logits: Tensor = self.model.compute_logits(hidden)  # type: ignore[operator]
        return logits.to("cpu")

    def receipt(self) -> dict[str, Any]:
        """Return which implementation of each operator is in the graphs, and ran outside of them."""
        merged: dict[str, list[dict[str, Any]]] = {}
        for receipt in (*self._receipts, functional.receipt()):
            for operator, rows in receipt.items():
                for row in rows:
                    _add(merged.setdefault(operator, []), row)
        return merged


def _add(rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
    facts = {key: value for key, value in row.items() if key != "selections"}
    for other in rows:
        if {key: value for key, value in other.items() if key != "selections"} == facts:
            other["selections"] = other.get("selections", 0) + row.get("selections", 0)
            return
    rows.append(dict(row))
