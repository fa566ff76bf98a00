# SPDX-License-Identifier: Apache-2.0
"""What a run left behind, as charts and a page: of the local runner and of NeMo-RL alike."""
