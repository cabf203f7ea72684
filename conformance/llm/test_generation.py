"""Real-LLM tier: each probe's tokens and full-vocabulary logprobs against the cold answer of the same engine.

The cold answer itself is compared with transformers' own model on the same checkpoint.
"""

from kvmatrix.pytest_plugin import check
from kvmatrix.records import ProbeRow


def test_generation(llm_row: ProbeRow) -> None:
    check(llm_row)
