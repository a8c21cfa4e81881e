import os

os.environ["NKI_SIMULATOR"] = "1"  # before anything imports pilotage
import my_norm  # noqa: F401  registers
from vllm import SamplingParams

from pilotage.arch import tiny
from pilotage.serving import launch


def served():
    settings = {"num_batched_tokens_buckets": [16], "num_seqs_buckets": [1]}
    with launch.engine(
        tiny.build("llama3"), dtype="float32", max_model_len=32, max_num_seqs=1, additional_config=settings
    ) as llm:
        prompt = {"prompt_token_ids": [5, 17, 99, 23, 41]}
        output = llm.generate(prompt, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
        receipt = llm.collective_rpc("receipt")[0]["operators"]["rms_norm"]
    return list(output[0].outputs[0].token_ids), {row["implementation"] for row in receipt}


mine, ran = served()
os.environ["PILOTAGE_DISABLE_KERNELS"] = "1"
plain, definition = served()
print("same tokens:", mine == plain, "with", ran, "and", definition)
