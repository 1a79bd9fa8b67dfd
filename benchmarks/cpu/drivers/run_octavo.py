"""octavo, through the door that scripts use: `LLM`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import timing


def main() -> None:
    options = timing.options()
    from octavo import LLM, EngineConfig, SamplingParams

    wanted = options["settings"]
    settings = {name: value for name, value in wanted.items() if name in EngineConfig.model_fields}
    llm = LLM(options["model"], disable_progress=True, **settings)

    def generate(batch: Sequence[list[int]], max_tokens: int) -> None:
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in batch], params, use_tqdm=False)
        for output in outputs:
            assert len(output.outputs[0].token_ids) == max_tokens, output.outputs[0].finish_reason

    values = timing.measure(generate, options)
    step = getattr(getattr(llm.engine.executor, "runner", None), "forward", None)
    timing.report(
        values,
        kernels=kernel_table(llm),
        step=getattr(step, "__qualname__", type(step).__name__),
        eager_because=getattr(step, "reason", None),
        attention=llm.engine.model_info.attention,
        plugins=[str(plugin) for plugin in llm.registry.plugins],
        settings=settings,
        unknown_settings=sorted(wanted.keys() - settings.keys()),
    )


def kernel_table(llm: Any) -> dict[str, dict[str, float]]:
    """Layers and MiB by "kernel: scheme"."""
    linears = llm.engine.model_info.linears
    layers = Counter(f"{report.kernel}: {report.spec}" for report in linears)
    sizes: Counter[str] = Counter()
    for report in linears:
        sizes[f"{report.kernel}: {report.spec}"] += report.num_bytes
    return {name: {"layers": number, "MiB": round(sizes[name] / 2**20, 1)} for name, number in layers.items()}


if __name__ == "__main__":
    main()
