"""The vLLM worker: one process (or the engine's own) that holds one rank's share of the model."""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import (
    ensure_model_parallel_initialized,
    get_tp_group,
    init_distributed_environment,
)
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from pilotage import parallel
from pilotage.core import store
from pilotage.core.errors import PilotageError
from pilotage.kernels.cpu.pages import use_huge_pages
from pilotage.serving import compile_cache, compile_mode, kv, kv_scales, layout, loading, speculation, targets, threads
from pilotage.serving.kv_read import KVReader
from pilotage.serving.runner import ModelRunner
from pilotage.serving.speculation import lanes

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

logger = logging.getLogger("vllm.pilotage")
P = ParamSpec("P")
R = TypeVar("R")
# Where a worker leaves what went wrong, for the process that started the engine; see `launch.engine`.
ERROR_FILE = "PILOTAGE_ERROR_FILE"


def _explained(method: Callable[P, R]) -> Callable[P, R]:
    """Say an error of ours in one line: vLLM only tells its user that "engine core initialization failed"."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except PilotageError as error:
            print(f"pilotage: {error}", file=sys.stderr, flush=True)
            if path := os.environ.get(ERROR_FILE):
                store.write_json(
                    Path(path),
                    {"kind": type(error).__name__, "what": error.what, "where": error.where, "do": error.do},
                )
            raise

    return call


class PilotageWorker(WorkerBase):
    """Loads a pilotage model, gives it pages, compiles its graphs and runs them."""

    model: torch.nn.Module
    runner: ModelRunner
    load_s: float
    compile_s: float | None = None
    kv_reader: KVReader | None = None
    draft_model: torch.nn.Module | None = None

    @_explained
    def init_device(self) -> None:
        """Join the process groups and set threads and seed."""
        threads.apply()
        config = self.vllm_config
        self.target = targets.select()
        if not self.target.tested:
            logger.warning("target %s: untested on hardware", self.target.name)
        if self.target.cache_variable is not None:
            os.environ.setdefault(self.target.cache_variable, str(compile_cache.root() / self.target.name))
        self.device = targets.device(self.target, self.local_rank)
        current_platform.device_name = self.target.name  # where vLLM's groups of ranks look for the device
        init_distributed_environment(
            self.parallel_config.world_size,
            self.rank,
            self.distributed_init_method,
            self.local_rank,
            self.target.collectives,
        )
        ensure_model_parallel_initialized(
            self.parallel_config.tensor_parallel_size, self.parallel_config.pipeline_parallel_size
        )
        group = get_tp_group()
        parallel.set_tp_group(group.device_group if group.world_size > 1 else None)
        parallel.set_parallel_layout(layout.parallel_layout(config))
        set_random_seed(config.model_config.seed)  # the same on every rank: they sample alike

    @_explained
    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Build the model and load this rank's weights."""
        if load_dummy_weights:
            raise NotImplementedError("dummy weights: give a tiny checkpoint instead")
        start = time.perf_counter()
        with set_current_vllm_config(self.vllm_config):
            cache_8bit = kv_scales.requested(self.vllm_config)
            self.model, self.ledger = loading.load_model(self.vllm_config, device=self.device, cache_8bit=cache_8bit)
            self.draft_model = speculation.load(self.vllm_config, self.model)
        for model in (self.model, self.draft_model):
            use_huge_pages((*model.parameters(), *model.buffers()) if model is not None else ())
        self.load_s = time.perf_counter() - start

    def get_model(self) -> torch.nn.Module:
        return self.model

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        self.kv_specs = kv.cache_specs(self.model.get_kv_spec().layers, self.cache_config.block_size)
        return dict(self.kv_specs)

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return [kv.LAYOUT]

    @_explained
    def determine_available_memory(self) -> int:
        free = targets.free_bytes(self.target, self.device)
        if not self.target.staged:  # the ranks of this machine share its memory
            free //= layout.ranks_on_this_machine(self.vllm_config)
        if self.draft_model is not None:
            free -= lanes.cache_bytes(self.draft_model, self.vllm_config)
        return kv.available_bytes(self.vllm_config, self.kv_specs, free)

    @_explained
    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the pages, hand them to the model and prepare the runner."""
        caches = kv.allocate(kv_cache_config, self.kv_specs, self.device, apart=self.target.compiler is not None)
        use_huge_pages((cache for pair in caches.values() for cache in pair), now=False)
        self.model.bind_kv_cache(caches)
        self.caches, self.kv_cache_config = caches, kv_cache_config
        self.runner = ModelRunner(self.vllm_config, self.model, kv_cache_config, caches, self.draft_model)

    @_explained
    def compile_or_warm_up_model(self) -> CompilationTimes:
        self.compile_s = self.runner.warm_up()
        compile_mode.compiled(self.rank, self.runner.graphs.table)
        set_random_seed(self.model_config.seed)
        return CompilationTimes(language_model=self.compile_s, encoder=0.0)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        if self.kv_reader is not None:
            self.kv_reader.before(scheduler_output)
        return self.runner.execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        return self.runner.sample_tokens(grammar_output)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        return self.runner.take_draft_token_ids()

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def execute_dummy_batch(self) -> None:
        """Do nothing: replicas of an engine share no layer, so that one without work has nothing to join in."""

    def update_max_model_len(self, max_model_len: int) -> None:
        """Follow vLLM where it lowers the length to what the memory allows (`max_model_len=-1`)."""
        self.model_config.max_model_len = max_model_len

    def synchronize_device(self) -> None:
        """Wait until the device has done what it was given; on the CPU every call returns when its work is done."""
        targets.synchronize(self.target, self.device)

    def record_start(self, directory: str, positions: list[int] | None = None) -> None:
        """See `runner.ModelRunner.record_start`."""
        self.runner.record_start(directory, positions)

    def record_stop(self) -> list[str]:
        """See `runner.ModelRunner.record_stop`."""
        return self.runner.record_stop()

    def kv_read_start(self, directory: str) -> None:
        """Keep the keys and values of every request that finishes from now on; see `kv_read.KVReader`."""
        self.kv_reader = KVReader(
            Path(directory),
            rank=self.rank,
            layers=self.model.get_kv_spec().layers,
            groups=kv.layer_groups(self.kv_cache_config, self.model_config.max_model_len),
            caches=self.caches,
            scales=kv_scales.of(self.model),
            requests=self.runner.requests,
        )

    def kv_read_stop(self) -> list[dict[str, str]]:
        """Stop; returns {"request", "file"} of what this rank kept."""
        reader, self.kv_reader = self.kv_reader, None
        return reader.stop() if reader is not None else []

    def capture_start(self, directory: str, patterns: list[str] | None = None, proof: bool = True) -> list[str]:
        """See `runner.ModelRunner.capture_start`."""
        return self.runner.capture_start(directory, patterns, proof)

    def capture_stop(self) -> dict[str, Any]:
        """See `runner.ModelRunner.capture_stop`."""
        return self.runner.capture_stop()

    def replace_start(
        self,
        tensors_path: str,
        prompt_token_ids_path: str | None = None,
        patterns: list[str] | None = None,
        proof: bool = True,
    ) -> list[str]:
        """See `runner.ModelRunner.replace_start`."""
        return self.runner.replace_start(tensors_path, prompt_token_ids_path, patterns, proof)

    def replace_sites(self, patterns: list[str]) -> list[str]:
        """See `probing.Probing.replace_sites`."""
        return self.runner.probing.replace_sites(patterns)

    def replace_stop(self) -> dict[str, Any]:
        """See `runner.ModelRunner.replace_stop`."""
        return self.runner.replace_stop()

    def probe_sites(self) -> list[str]:
        """Return the names of all sites of the model."""
        return list(self.runner.probing.known)

    def receipt(self) -> Mapping[str, Any]:
        """Return the runner's receipt, the load and compile times and the thread count, as JSON values."""
        receipt = {
            **self.runner.receipt(),
            "load_s": self.load_s,
            "compile_s": self.compile_s,  # less than its graphs together, which compile side by side
            "threads": torch.get_num_threads(),
            "num_blocks": self.cache_config.num_gpu_blocks,
            "kv_cache": kv.summary(self.kv_cache_config, self.caches),
        }
        if getattr(self.model, "fallback", False):  # no model package: say so, and what was proven at load
            receipt["fallback"] = vars(self.model.proof)
        return json.loads(json.dumps(receipt, default=str))
