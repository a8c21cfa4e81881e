"""The vLLM platform: which worker runs, what the defaults are, and which requests and configurations are refused."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import sys
from typing import TYPE_CHECKING, Any

import psutil
import torch
from vllm.platforms.interface import Platform, PlatformEnum

from pilotage.core.config import TargetConfig
from pilotage.core.errors import BadInput, PilotageError, Unsupported
from pilotage.serving import buckets, compile_mode, device_sampling, kv_scales, layout, speculation, targets, threads
from pilotage.serving.speculation import DRAFTS_KEY

if TYPE_CHECKING:
    from vllm.config import VllmConfig

BLOCK_SIZE = 32
# vLLM's defaults (256 requests, 8,192 tokens) would compile 19 graphs, most of which two cores never fill.
DEFAULT_MAX_NUM_SEQS = 16
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
# Weights that a model package makes plain ones of while loading, by vLLM's names.
_DEQUANTISED = ("fp8", "compressed-tensors", "mxfp4", "gpt_oss_mxfp4")
FORCE_KEY = "pilotage_force"
PROMPT_KEY = "pilotage_prompt"

# vLLM calls these where it frees accelerator memory, whether or not an accelerator exists; without one they raise.
torch.accelerator.empty_cache = lambda: None  # type: ignore[assignment]
torch.accelerator.empty_host_cache = lambda: None  # type: ignore[attr-defined]


class PilotagePlatform(Platform):
    """CPU target on the out-of-tree worker of pilotage.

    It stays an out-of-tree platform for vLLM (`is_cpu()` is false): the branches for vLLM's own CPU platform call C
    operators that the pure-Python build does not have.
    """

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"
    # For the few helpers that vLLM compiles itself (ranks of logprobs): not worth a C++ compiler at the first request.
    simple_compile_backend = "eager"

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        """Set what must be in place before vLLM builds its configuration."""
        _set_engine_defaults()
        _print_own_errors_without_trace()
        if parser is not None and any(action.dest == "host" for action in parser._actions):
            parser.set_defaults(host="127.0.0.1")  # vLLM's own default is every interface of the machine

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Choose worker, block size, buckets and compilation mode; refuse what this target does not do.

        Raises:
            ConfigError: unknown or contradictory settings.
            Unsupported: a feature of vLLM that this target lacks.
            Unavailable: the target that the environment names lacks its packages.
        """
        from vllm.config import CompilationMode, CUDAGraphMode

        targets.require(targets.select())
        compile_mode.require()
        config = TargetConfig.from_additional_config(vllm_config.additional_config)
        model_config = vllm_config.model_config
        parallel, scheduler, cache = (
            vllm_config.parallel_config,
            vllm_config.scheduler_config,
            vllm_config.cache_config,
        )
        parallel.worker_cls = "pilotage.serving.worker.PilotageWorker"
        parallel.disable_custom_all_reduce = True
        if not cache.user_specified_block_size:
            cache.block_size = BLOCK_SIZE
        compilation = vllm_config.compilation_config
        compilation.mode = CompilationMode.NONE  # our worker compiles whole forwards itself
        compilation.cudagraph_mode = CUDAGraphMode.NONE
        compilation.max_cudagraph_capture_size = 0
        compilation.cudagraph_capture_sizes = []
        if model_config is None:  # vLLM builds bare configurations in some of its own helpers
            return
        _refuse_unsupported(vllm_config)
        buckets.Reach.of(config, model_config.max_model_len, cache.block_size)
        sizes = resolve_buckets(config, scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
        token_sizes, seq_sizes = sizes
        scheduler.max_num_batched_tokens = token_sizes[-1]
        scheduler.max_num_scheduled_tokens = min(scheduler.max_num_scheduled_tokens or token_sizes[-1], token_sizes[-1])
        scheduler.max_num_seqs = min(seq_sizes[-1], token_sizes[-1])
        cls._longest_prompt = None if scheduler.enable_chunked_prefill else token_sizes[-1]
        cls._vocab_size = model_config.get_vocab_size()
        cls._salt = _salt(config)
        if vllm_config.speculative_config is not None:
            scheduler.async_scheduling = False  # the next step's drafts are guessed from this step's tokens
        threads.set_environment(layout.ranks_on_this_machine(vllm_config))
        compile_mode.end_when_compiled(vllm_config)

    # For validate_request, from the engine configured last in this process. Largest prompt that fits a graph where
    # prompts are not cut into chunks, the vocabulary, and what keeps replaced keys and values apart from all others.
    _longest_prompt: int | None = None
    _vocab_size: int | None = None
    _salt: str | None = None

    @classmethod
    def validate_request(cls, processed_inputs: Any, params: Any) -> None:
        """Refuse a request that no graph can hold, or whose own arguments are unusable.

        Under a configured replacement it also salts the request's pages: what was computed from reference tensors
        must serve no other request, wherever the pages end up.

        Raises:
            VLLMValidationError: answered as HTTP 400 by the server.
        """
        from vllm.exceptions import VLLMValidationError

        token_ids = processed_inputs.get("prompt_token_ids") or []
        if cls._longest_prompt is not None and len(token_ids) > cls._longest_prompt:
            raise VLLMValidationError(
                f"the prompt has {len(token_ids)} tokens; the largest prefill bucket is {cls._longest_prompt} "
                "(num_batched_tokens_buckets) and chunked prefill is off: shorten the prompt, raise "
                "max_num_batched_tokens or enable chunked prefill"
            )
        extra = getattr(params, "extra_args", None) or {}
        prompt = extra.get(PROMPT_KEY)
        if prompt is not None and (type(prompt) is not int or prompt < 0):
            raise VLLMValidationError(f"extra_args[{PROMPT_KEY!r}] must be the index of a prompt, got {prompt!r}")
        if cls._salt is not None:
            # Named prompts may have different references for tokens that they share.
            own = "" if prompt is None else prompt
            processed_inputs["cache_salt"] = f"{cls._salt}{own}-{processed_inputs.get('cache_salt') or ''}"
        cls._require_tokens(FORCE_KEY, extra.get(FORCE_KEY))
        drafts = extra.get(DRAFTS_KEY)
        if drafts is not None and not isinstance(drafts, list | tuple):
            raise VLLMValidationError(
                f"extra_args[{DRAFTS_KEY!r}] must be a list of lists of token ids, got {drafts!r}"
            )
        for ids in drafts or ():
            cls._require_tokens(DRAFTS_KEY, ids)

    @classmethod
    def _require_tokens(cls, key: str, tokens: Any) -> None:
        from vllm.exceptions import VLLMValidationError

        if tokens is None:
            return
        if not isinstance(tokens, list | tuple) or not all(type(token) is int for token in tokens):
            raise VLLMValidationError(f"extra_args[{key!r}] must be a list of token ids, got {tokens!r}")
        for token in tokens:
            if token < 0 or (cls._vocab_size is not None and token >= cls._vocab_size):
                raise VLLMValidationError(
                    f"extra_args[{key!r}]: {token} is not in the vocabulary of {cls._vocab_size} tokens"
                )

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """Give vLLM's rejection sampler kernels that run without Triton."""
        speculation.register()

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """Do nothing; must exist, or the multiprocess executor hangs under async scheduling."""

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: VllmConfig) -> None:
        """Keep the block size: no attention backend of vLLM runs here."""

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        """Let sliding-window layers free the pages that they can no longer see.

        Layers of different groups then share bytes, each in pages of its own. A compiler that is not held to writing in
        place may write a whole cache back at the end of a graph, over what another layer has written.
        """
        return targets.select().compiler is None

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False

    @classmethod
    def import_kernels(cls) -> None:
        """Import nothing: the pure-Python build of vLLM has no C operators."""

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "cpu"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return psutil.virtual_memory().total

    @classmethod
    def get_current_memory_usage(cls, device: torch.device | None = None) -> float:
        return float(psutil.Process().memory_info().rss)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        torch.manual_seed(seed)

    @classmethod
    def inference_mode(cls) -> Any:
        return torch.no_grad()


def resolve_buckets(
    config: TargetConfig, max_num_batched_tokens: int, max_num_seqs: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the prefill buckets in tokens and the decode buckets in requests.

    Raises:
        ConfigError: a bucket is above vLLM's own limit.
    """
    token_sizes = buckets.fit(
        "num_batched_tokens_buckets",
        config.num_batched_tokens_buckets,
        buckets.token_buckets(max_num_batched_tokens),
        "max_num_batched_tokens",
    )
    seq_sizes = buckets.fit(
        "num_seqs_buckets", config.num_seqs_buckets, buckets.seq_buckets(max_num_seqs), "max_num_seqs"
    )
    return token_sizes, seq_sizes


def _salt(config: TargetConfig) -> str | None:
    """Name the replacement plan of a configuration; None where nothing is replaced."""
    plan = config.tensor_replacement
    if plan is None or "tensors_path" not in plan:
        return None
    return f"pilotage-{hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:16]}-"


def _has_package(architectures: list[str]) -> bool:
    from pilotage.serving import loading

    return loading.find_factory(architectures) is not None


def _refuse_unsupported(vllm_config: VllmConfig) -> None:
    model_config, parallel = vllm_config.model_config, vllm_config.parallel_config
    refusals = [
        (model_config.runner_type != "generate", f"runner {model_config.runner_type!r}", "use a generative model"),
        (vllm_config.lora_config is not None, "LoRA", "merge the adapter into the checkpoint"),
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism", "use tensor_parallel_size"),
        (
            # A package's factory reads the checkpoint's scheme itself, and refuses what it does not dequantise.
            model_config.quantization is not None
            and not (model_config.quantization in _DEQUANTISED and _has_package(model_config.architectures)),
            f"quantization {model_config.quantization!r} of {', '.join(model_config.architectures)}",
            "use bf16 or fp32",
        ),
        (vllm_config.kv_transfer_config is not None, "KV transfer", "remove kv_transfer_config"),
    ]
    for refused, what, do in refusals:
        if refused:
            raise Unsupported(f"{what} is not implemented on this target", where="vLLM configuration", do=do)
    kv_scales.require_supported(vllm_config)
    speculation.require_supported(vllm_config)
    device_sampling.require_supported(vllm_config, TargetConfig.from_additional_config(vllm_config.additional_config))
    sizes = layout.parallel_layout(vllm_config)
    if not require_known_architecture(model_config.architectures, model_config.model):
        layout.require_own_model(sizes, model_config.architectures)
        kv_scales.require_package(vllm_config)
        from pilotage.serving.fallback.config import prepare

        prepare(vllm_config)


def require_known_architecture(architectures: list[str], model: str) -> bool:
    """Raise unless one of `architectures` has a model package or is a causal language model of transformers.

    Returns:
        Whether there is a package, here or registered with vLLM by a plugin; without one the fallback has to serve.

    Raises:
        Unsupported: neither; the known ones are named.
    """
    from pilotage.serving import loading

    if loading.find_factory(architectures) is not None:
        return True
    from pilotage.models import registry
    from pilotage.serving.fallback.config import find

    if find(architectures) is None:
        known = ", ".join(sorted(registry.entries()))
        raise Unsupported(
            f"no model package for architecture {', '.join(architectures)} (there are: {known}), and transformers "
            "generates no text with it alone, which the fallback needs",
            where=model,
            do="write one with `pilotage new`, or register one through the entry point group pilotage.models",
        )
    return False


def _set_engine_defaults() -> None:
    """Give vLLM defaults that suit this target; what the user states stays."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    def get_batch_defaults(cls: type, world_size: int) -> tuple[dict[Any, int], dict[Any, int]]:
        contexts = (None, *UsageContext)
        return (
            dict.fromkeys(contexts, DEFAULT_MAX_NUM_BATCHED_TOKENS),
            dict.fromkeys(contexts, DEFAULT_MAX_NUM_SEQS),
        )

    EngineArgs.get_batch_defaults = classmethod(get_batch_defaults)
    # The last default that is filled in before the configuration is made; there, "not stated" can still be seen.
    fill_in = EngineArgs._set_default_max_num_seqs_and_batched_tokens_args
    if getattr(fill_in, "_pilotage", False):
        return

    @functools.wraps(fill_in)
    def fill_in_ours(self: Any, *args: Any, **kwargs: Any) -> None:
        fill_in(self, *args, **kwargs)
        if self.async_scheduling is None and _computes_where_it_schedules(self):
            self.async_scheduling = False

    fill_in_ours._pilotage = True  # type: ignore[attr-defined]
    EngineArgs._set_default_max_num_seqs_and_batched_tokens_args = fill_in_ours


def _computes_where_it_schedules(arguments: Any) -> bool:
    """Whether the model runs in the scheduler's own process. There a step is over before the next one is scheduled:
    scheduling ahead overlaps nothing, and vLLM would hold every token back until the next step is computed as well.
    """
    backend = arguments.distributed_executor_backend
    if backend == "external_launcher":
        return True
    return backend in (None, "uni") and arguments.pipeline_parallel_size * arguments.tensor_parallel_size == 1


def _print_own_errors_without_trace() -> None:
    """Print a user's mistake as one line and leave with its exit code, also under `vllm serve`."""
    previous = sys.excepthook
    if getattr(previous, "_pilotage", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        mistake = _mistake(error)
        if mistake is None:
            previous(kind, error, trace)
            return
        print(f"pilotage: {mistake}", file=sys.stderr)
        sys.stderr.flush()
        sys.exit(mistake.exit_code)

    hook._pilotage = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _mistake(error: BaseException) -> PilotageError | None:
    """Return what the user can act on in an uncaught error, or None."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, PilotageError):
            return cause
        if isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE:
            return BadInput("the address is in use", where="vllm serve", do="choose another --port")
        cause = cause.__cause__
    return None
