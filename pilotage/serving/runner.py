"""The model runner: a scheduler step in, sampled tokens out.

A step is split into forwards (`batch.split`), each run in the graph of its bucket; the logits of all of them are put
into the order of vLLM's input batch, and vLLM's own sampler takes over. Everything is computed when `sample_tokens`
returns, so asynchronous scheduling needs no placeholder tokens here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds, ModelRunnerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors, build_logitsprocs
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.structured_output.utils import apply_grammar_bitmask
from vllm.v1.worker.gpu_input_batch import InputBatch

from pilotage.core.config import TargetConfig
from pilotage.core.errors import Unsupported
from pilotage.functional import count_fallbacks
from pilotage.serving import batch, buckets, speculation
from pilotage.serving.device_sampling import DeviceSampling
from pilotage.serving.graphs import Graphs
from pilotage.serving.observer import prove
from pilotage.serving.platform import FORCE_KEY
from pilotage.serving.probing import Probing
from pilotage.serving.record import Recorder
from pilotage.serving.requests import Requests
from pilotage.serving.sampling import ForcedTokens, PromptScores, only_argmax
from pilotage.serving.step_sampler import StepSampler

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from pilotage.probe.plan import Taps


class ModelRunner:
    """Runs one rank's share of the model."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: torch.nn.Module,
        kv_cache_config: KVCacheConfig,
        caches: Mapping[str, list[Tensor]],
        draft_model: torch.nn.Module | None = None,
    ) -> None:
        """Prepare the batch and the graphs; nothing is compiled yet.

        Args:
            vllm_config: vLLM's configuration.
            model: loaded, with its KV cache bound.
            kv_cache_config: vLLM's plan of the KV cache.
            caches: layer name -> [keys, values], as bound to the model.
            draft_model: loaded, where `speculative_config` names one.
        """
        model_config, scheduler = vllm_config.model_config, vllm_config.scheduler_config
        self.config = TargetConfig.from_additional_config(vllm_config.additional_config)
        self.vllm_config, self.model = vllm_config, model
        self.vocab_size = model_config.get_vocab_size()
        self.sampler = Sampler(model_config.logprobs_mode)
        self.prompt_scores = PromptScores(self.sampler, model_config.logprobs_mode, self.vocab_size)
        self.requests = Requests(
            _input_batch(vllm_config, kv_cache_config),
            self.prompt_scores,
            async_scheduling=bool(scheduler.async_scheduling),
        )
        self.token_buckets = buckets.fit(
            "num_batched_tokens_buckets",
            self.config.num_batched_tokens_buckets,
            buckets.token_buckets(scheduler.max_num_batched_tokens),
            "max_num_batched_tokens",
        )
        self.seq_buckets = buckets.fit(
            "num_seqs_buckets",
            self.config.num_seqs_buckets,
            buckets.seq_buckets(scheduler.max_num_seqs),
            "max_num_seqs",
        )
        self.tokens_per_req = speculation.tokens_per_req(vllm_config)
        self.prefill_seqs = min(self.config.max_prefill_seqs, scheduler.max_num_seqs)
        self.proposer = speculation.proposer(
            vllm_config,
            draft_model,
            token_buckets=self.token_buckets,
            seq_buckets=self.seq_buckets,
            prefill_seqs=self.prefill_seqs,
        )
        self.probing = Probing(
            model,
            self.config,
            num_tokens=max(self.token_buckets[-1], self.seq_buckets[-1] * self.tokens_per_req),
            num_sampled=max(self.prefill_seqs, self.seq_buckets[-1] * self.tokens_per_req),
        )
        self.graphs = Graphs(
            vllm_config,
            model,
            kv_cache_config,
            caches,
            token_buckets=self.token_buckets,
            seq_buckets=self.seq_buckets,
            prefill_seqs=self.prefill_seqs,
            tokens_per_req=self.tokens_per_req,
        )
        self.graphs.taps = self.probing.taps
        self.probing.speculates = self.tokens_per_req > 1
        self.device_sampling = self._device_sampling()
        verifier = RejectionSampler(self.sampler, vllm_config.speculative_config)
        self.step_sampler = StepSampler(self.requests.batch, self.sampler, verifier, self.device_sampling)
        self.recorder: Recorder | None = None
        self._pending: tuple[SchedulerOutput, list[batch.Scheduled], Tensor, dict[str, Tensor]] | None = None
        self._drafts: DraftTokenIds | None = None

    def _device_sampling(self) -> DeviceSampling | None:
        stages = self.config.on_device_sampling_config
        if stages is None:
            return None
        if not hasattr(self.model, "on_device_sampling"):
            raise Unsupported(
                "the model's forward does not sample",
                where=type(self.model).__name__,
                do="remove on_device_sampling_config",
            )
        sampling = DeviceSampling(stages, force_key=FORCE_KEY)
        self.model.on_device_sampling = sampling.stages  # type: ignore[assignment]
        return sampling

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput | None:
        """Compute the logits of a step; None means that `sample_tokens` has the answer."""
        scheduled = self.requests.update(step)
        self.probing.finished(step.finished_req_ids)
        if not scheduled:
            return EMPTY_MODEL_RUNNER_OUTPUT
        rows = self.requests.batch
        device = self.device_sampling
        unfinished: set[int] = set()
        if device is not None:
            device.begin(step.finished_req_ids)
            unfinished = set(self.requests.unfinished_prefills(scheduled))
        # A row of logits for each draft of a request, and one for the token after them.
        counts = [1 + len(rows.spec_token_ids[row]) for row in range(rows.num_reqs)]
        likely_only = self._reads_largest_only(step) and max(counts) == 1
        logits: Tensor | None = None
        hidden: dict[str, Tensor] = {}
        forwards = batch.split(
            scheduled,
            max_tokens=self.token_buckets[-1],
            max_prefill_seqs=self.prefill_seqs,
            decode_token_threshold=self.tokens_per_req,
        )
        for forward in forwards:
            inputs = self.graphs.inputs_for(forward, rows.num_computed_tokens_cpu)
            inputs.fill(
                forward,
                token_ids=rows.token_ids_cpu,
                num_computed=rows.num_computed_tokens_cpu,
                block_tables=[table.get_numpy_array() for table in rows.block_table.block_tables],
            )
            if rows.req_prompt_embeds:
                inputs.fill_embeds(
                    forward,
                    embeds=rows.req_prompt_embeds,
                    is_token_ids=rows.is_token_ids,
                    num_computed=rows.num_computed_tokens_cpu,
                )
            wanted = [counts[row] for row in forward.rows]
            if device is not None:
                device.fill(inputs, forward, rows, self.requests.states, unfinished, wanted)
            if not self._reads_hidden_states and max(counts) == 1:
                inputs.want_sampled()
            if likely_only:
                inputs.want_likely()
            ids = [rows.req_ids[row] for row in forward.rows]
            self.probing.before(inputs, forward, ids, self.requests.states)
            all_logits, states = self.graphs.run(inputs)
            self.probing.after(inputs, forward, ids, self.requests.states)
            if self.proposer is not None and inputs.aux_hidden_states is not None:
                before = rows.num_computed_tokens_cpu[list(forward.rows)].tolist()
                self.proposer.observe(ids, forward.num_tokens, before, inputs.aux_hidden_states)
            if self.recorder is not None:
                computed = [int(rows.num_computed_tokens_cpu[row]) for row in forward.rows]
                sampled_at = inputs.sampling_positions[: inputs.sampled].tolist()
                self.recorder.add(forward, ids, computed, all_logits, states, self.graphs.compute_logits, sampled_at)
            if self.prompt_scores.wanted:
                ends = torch.tensor(forward.num_tokens).cumsum(0).tolist()
                for req_id, end, count in zip(ids, ends, forward.num_tokens, strict=True):
                    hidden[req_id] = states[end - count : end]
            found, places = self._sampled(inputs, forward, all_logits, states, counts)
            if device is not None:
                device.keep(inputs, forward, rows, unfinished, wanted, found)
            if len(forwards) == 1 and forward.rows == tuple(range(rows.num_reqs)):
                logits = found
            else:
                if logits is None:
                    logits = all_logits.new_zeros(sum(counts), all_logits.shape[1])
                logits[places] = found
        assert logits is not None
        self._pending = (step, scheduled, logits, hidden)
        return None

    @property
    def _reads_hidden_states(self) -> bool:
        """Whether hidden states are read at other rows than those that are sampled from."""
        return self._is_watched or self.proposer is not None

    @property
    def _is_watched(self) -> bool:
        """Whether something beside the sampler reads what the graphs compute."""
        return bool(self.prompt_scores.wanted or self.recorder is not None or self.graphs.taps is not None)

    def _reads_largest_only(self, step: SchedulerOutput) -> bool:
        """Whether nothing is read of this step's logits but which of a row is the largest."""
        return (
            not self._is_watched
            and not step.has_structured_output_requests
            and only_argmax(self.requests.batch.sampling_metadata)
        )

    def _sampled(
        self, inputs: batch.StepInputs, forward: batch.Forward, logits: Tensor, states: Tensor, counts: Sequence[int]
    ) -> tuple[Tensor, list[int]]:
        """Pick the logits that the sampler wants from those of a forward.

        Args:
            inputs, forward: what ran.
            logits, states: what it returned.
            counts: for each row of the batch how many rows of logits are wanted, its last ones.

        Returns:
            Logits [sum of the counts of the forward's rows, V], request by request, and where they belong among those
            of the whole batch.
        """
        wanted = [counts[row] for row in forward.rows]
        starts = np.cumsum(counts) - counts
        places = [int(starts[row]) + n for row in forward.rows for n in range(counts[row])]
        if max(wanted) == 1 and not inputs.verifies:
            return logits[: len(wanted)], places
        if inputs.verifies:
            tokens = [n for found in inputs.sampled_rows(forward, wanted) for n in found or ()]
            return (logits[: len(tokens)] if len(tokens) == inputs.sampled else logits[tokens]), places
        ends = np.cumsum(forward.num_tokens)
        tokens = [int(end) - count + n for end, count in zip(ends, wanted, strict=True) for n in range(count)]
        # A request that enters the batch with drafts runs as prefill, whose graph has logits for last tokens only.
        return self.graphs.compute_logits(states[tokens]), places

    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """Sample from the logits of the step before."""
        if self._pending is None:
            return EMPTY_MODEL_RUNNER_OUTPUT
        step, scheduled, logits, hidden = self._pending
        self._pending = None
        rows = self.requests.batch
        if grammar is not None:
            logits = logits.float()
            apply_grammar_bitmask(step, grammar, rows, logits)
        unfinished = self.requests.unfinished_prefills(scheduled)
        # A row without a token to sample must not use up its request's random numbers: output would depend on how the
        # prompt was cut into chunks.
        kept = {row: rows.generators[row].get_state() for row in unfinished if row in rows.generators}
        drafts = rows.spec_token_ids[: rows.num_reqs]
        verifies = any(drafts)
        choice = self.proposer.choice if self.proposer is not None else None
        output = self.step_sampler(logits, drafts, len(unfinished), choice)
        for row, state in kept.items():
            rows.generators[row].set_state(state)
        tokens = self._agreed(output.sampled_token_ids)
        scored = output.logprobs_tensors
        if verifies:
            sampled, logprobs = RejectionSampler.parse_output(tokens, self.vocab_size, unfinished, scored)
        else:
            sampled, logprobs = tokens.tolist(), scored.tolists() if scored is not None else None
            for row in unfinished:
                sampled[row] = []
        scores = {}
        if self.prompt_scores.wanted:
            scores = self.prompt_scores.collect(self.requests.states, hidden, self.graphs.compute_logits)
        self.requests.append(sampled)
        self.probing.settle(self.requests.computed)
        self._propose(sampled)
        return ModelRunnerOutput(
            req_ids=list(rows.req_ids),
            req_id_to_index=dict(rows.req_id_to_index),
            sampled_token_ids=sampled,
            logprobs=logprobs,
            prompt_logprobs_dict=dict(scores),
        )

    def _propose(self, sampled: Sequence[Sequence[int]]) -> None:
        """Guess what follows this step's tokens, for `take_draft_token_ids`."""
        if self.proposer is None:
            return
        rows = self.requests.batch
        wanted = [row for row, tokens in enumerate(sampled) if tokens]
        drafts = self.proposer.propose(rows, wanted)
        for row in wanted:
            room = min(self.tokens_per_req - 1, rows.max_model_len - int(rows.num_tokens_no_spec[row]))
            stated = speculation.named(self.requests.states[rows.req_ids[row]], room)
            if stated is not None:
                drafts[row] = stated
                if self.proposer.choice is not None:
                    self.proposer.choice.forget(rows.req_ids[row])
        self._drafts = DraftTokenIds(list(rows.req_ids), drafts)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Hand out the drafts of the step before, once."""
        drafts, self._drafts = self._drafts, None
        return drafts

    def _agreed(self, sampled: Tensor) -> Tensor:
        """Take the first rank's tokens on every rank: they go into every rank's next inputs."""
        from vllm.distributed import get_tp_group

        group = get_tp_group()
        if group.world_size > 1:
            torch.distributed.broadcast(sampled, src=group.ranks[0], group=group.cpu_group)
        return sampled

    def record_start(self, directory: str, positions: list[int] | None = None) -> None:
        """Write the raw logits of every position (of `positions`) computed from now on; see `record.Recorder`."""
        write = self.vllm_config.parallel_config.rank == 0
        self.recorder = Recorder(Path(directory), write=write, positions=positions)

    def record_stop(self) -> list[str]:
        """Stop recording; returns the files in the order in which they were computed."""
        recorder, self.recorder = self.recorder, None
        return recorder.stop() if recorder is not None else []

    def warm_up(self) -> float:
        """Compile the graphs, prove that configured taps change nothing, and start configured recording.

        Returns:
            Seconds spent on the graphs.
        """
        seconds = self.graphs.warm_up()
        if self.proposer is not None:
            seconds += self.proposer.warm_up()
        capture = self.config.tensor_capture
        if self.probing.taps is not None:
            seconds += self._prove()
        if capture is not None and "path" in capture:
            self.probing.capture_start(capture["path"])
        return seconds

    def _prove(self) -> float:
        start = time.perf_counter()
        self.probing.observer = prove(self.graphs, self.probing.taps)
        return time.perf_counter() - start

    def capture_start(self, directory: str, patterns: list[str] | None = None, proof: bool = True) -> list[str]:
        """Write the rows of sites from now on; see `probing.Probing.capture_start`.

        Args:
            directory: for `probe.Captures.open`; continued if it has captures.
            patterns: of sites; None for the configured ones.
            proof: compare logits with and without the taps first, unless that was done for these sites.
        """
        before = self.probing.taps
        names = self.probing.capture_start(directory, patterns)
        self._taps_changed(before, proof)
        return names

    def capture_stop(self) -> dict[str, Any]:
        """Stop writing; see `probing.Probing.capture_stop`."""
        summary = self.probing.capture_stop()
        self._taps_changed(self.probing.taps, False)
        return summary

    def replace_start(
        self,
        tensors_path: str,
        prompt_token_ids_path: str | None = None,
        patterns: list[str] | None = None,
        proof: bool = True,
    ) -> list[str]:
        """Hand a reference onward from now on; see `probing.Probing.replace_start`."""
        before = self.probing.taps
        names = self.probing.replace_start(tensors_path, prompt_token_ids_path, patterns)
        self._taps_changed(before, proof)
        return names

    def replace_stop(self) -> dict[str, Any]:
        """Replace nothing from now on; returns the receipt."""
        receipt = self.probing.replace_stop()
        self._taps_changed(self.probing.taps, False)
        return receipt

    def _taps_changed(self, before: Taps | None, proof: bool) -> None:
        self.graphs.taps = self.probing.taps
        if self.probing.taps is not None and self.probing.taps is not before:
            self.probing.observer = None
            if proof:
                self._prove()

    def receipt(self) -> Mapping[str, Any]:
        """Return which operators ran, which graphs were compiled, and what was tapped and replaced."""
        operators = self.graphs.receipt()
        return {
            "operators": operators,
            "kernel_fallbacks": count_fallbacks(operators),
            "buckets": self.graphs.table,
            "observer": self.probing.observer,
            "replacement": self.probing.receipt(),
        }


def _input_batch(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> InputBatch:
    model_config, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    device = torch.device("cpu")
    processors = build_logitsprocs(vllm_config, device, False, False, model_config.logits_processors or ())
    # Last of those that can change the argmax, so that a forced token is forced whatever the others did.
    processors = LogitsProcessors(
        (
            *processors.argmax_invariant,
            *processors.non_argmax_invariant,
            ForcedTokens(vllm_config, device, False),
        )
    )
    block_sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
    return InputBatch(
        max_num_reqs=scheduler.max_num_seqs,
        max_model_len=model_config.max_model_len,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        device=device,
        vocab_size=model_config.get_vocab_size(),
        block_sizes=block_sizes,
        max_num_blocks_per_req=[math.ceil(model_config.max_model_len / size) for size in block_sizes],
        logitsprocs=processors,
        num_spec_tokens=speculation.tokens_per_req(vllm_config) - 1,
        logitsprocs_need_output_token_ids=True,
    )
