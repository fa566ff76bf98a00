# SPDX-License-Identifier: Apache-2.0
"""Reports about a run of the lab's local runner or of NeMo-RL, with tables, charts, advice and lines for the terminal."""
