# SPDX-License-Identifier: Apache-2.0
"""Lists options of vLLM that the V2 model runner of older versions refuses.

vLLM alone runs a config with such an option on its V1 model runner. But this package needs V2, so no engine would start. To
tell the user early, the command `check` and the start of a run refuse the option. The options were read from the method
`VllmConfig._get_v2_model_runner_unsupported_features` in each version of vLLM. `tests/test_older_families.py` tries them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nemo_specrollout.config.nemo_rl_tree import VLLM_CFG, VLLM_KWARGS, Finding, Tree, at
from nemo_specrollout.installed.versions import version_numbers

Version = tuple[int, ...]


@dataclass(frozen=True)
class V2Lack:
    """An option of vLLM that the V2 model runner of older versions refuses."""

    paths: tuple[str, ...]
    """Paths of the config's fields that turn the option on."""
    taken_since: Version
    """First version of vLLM whose V2 model runner accepts the option."""
    lack: str
    """Verb phrase that says what the older V2 model runner cannot do. Words in quotation marks are those of vLLM's error."""
    values: tuple[str, ...] = ()
    """Values of the option that are refused. The empty tuple means all values except null, false, 1 and empty ones."""
    fix: str = "remove it"

    def field_in(self, tree: Tree) -> str | None:
        """Returns the path of the field that turns the option on in the config `tree`, or None if it is off."""
        return next((path for path in self.paths if self._refuses(at(tree, path))), None)

    def _refuses(self, value: Any) -> bool:
        if self.values:
            return str(value) in self.values
        return value is True or value not in (None, False, 1, "", [], {})


V2_LACKS = (
    V2Lack(
        ("policy.router_replay.enabled", f"{VLLM_KWARGS}.enable_return_routed_experts"),
        (0, 28, 0),
        'cannot return the experts of each token ("routed experts capture")',
        fix="set it to false",
    ),
    V2Lack(
        (f"{VLLM_KWARGS}.logits_processors",), (0, 32, 0), 'takes no logits processors ("custom logits processors")'
    ),
    V2Lack((f"{VLLM_KWARGS}.enable_prompt_embeds",), (0, 29, 0), 'takes no embedded prompts ("prompt embeds")'),
    V2Lack((f"{VLLM_KWARGS}.kv_sharing_fast_prefill",), (0, 32, 0), 'lacks "KV sharing fast prefill"'),
    V2Lack((f"{VLLM_KWARGS}.ec_transfer_config",), (0, 28, 0), 'lacks "EC transfer"'),
    V2Lack((f"{VLLM_KWARGS}.enable_elastic_ep",), (0, 32, 0), 'lacks "elastic expert parallelism"'),
    V2Lack((f"{VLLM_KWARGS}.enable_dbo",), (0, 32, 0), 'lacks "dual batch overlap"'),
    V2Lack((f"{VLLM_KWARGS}.prefill_context_parallel_size",), (0, 26, 0), 'lacks "prefill context parallelism"'),
    V2Lack(
        (f"{VLLM_CFG}.logprobs_mode", f"{VLLM_KWARGS}.logprobs_mode"),
        (0, 26, 0),
        'cannot return logits in the place of log-probs ("logprobs mode")',
        ("raw_logits", "processed_logits"),
        "set processed_logprobs",
    ),
)
"""The options that the V2 model runner of an older version refuses and that a config of NeMo-RL can set.

Options that `nemo_rl_rules.py` refuses with every version of vLLM are left out."""


def v2_lacks(tree: Tree, version: str | None) -> Iterator[Finding]:
    """Yields an error for each option of a config that the V2 model runner of a version of vLLM refuses.

    If the version is not known (None), yields a note for each option that some supported version refuses.
    """
    numbers = None if version is None else version_numbers(version)
    for lack in V2_LACKS:
        field = lack.field_in(tree)
        if field is None or (numbers is not None and numbers >= lack.taken_since):
            continue
        since = ".".join(map(str, lack.taken_since))
        refusal = f"{at(tree, field)!r}; before vLLM {since} the V2 model runner {lack.lack}"
        if numbers is None:
            yield Finding(field, f"{refusal}; which vLLM the engines will have is not known here", "note")
            continue
        yield Finding(field, f"{refusal}, and the engines have {version}: {lack.fix}, or use vLLM {since}", "error")
