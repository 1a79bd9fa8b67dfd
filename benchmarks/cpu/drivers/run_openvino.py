"""OpenVINO GenAI: its ContinuousBatchingPipeline, over a model that optimum has exported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import timing


def main() -> None:
    options = timing.options()
    import numpy
    import openvino
    import openvino_genai as genai

    scheduling = genai.SchedulerConfig()
    scheduling.cache_size = 1  # GB
    scheduling.max_num_batched_tokens = 2048
    scheduling.enable_prefix_caching = any(work.startswith("context") for work in options["works"])
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": options["threads"], **options["settings"]}
    pipeline = genai.ContinuousBatchingPipeline(options["model"], scheduling, "CPU", properties)

    def generate(batch: Sequence[list[int]], max_tokens: int) -> None:
        config = genai.GenerationConfig(max_new_tokens=max_tokens, min_new_tokens=max_tokens, ignore_eos=True)
        config.do_sample = False
        inputs = [openvino.Tensor(numpy.array([ids], dtype=numpy.int64)) for ids in batch]
        results = pipeline.generate(inputs, [config] * len(batch))
        for result in results:
            assert len(result.m_generation_ids[0]) == max_tokens

    timing.report(timing.measure(generate, options))


if __name__ == "__main__":
    main()
