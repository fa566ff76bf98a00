# SPDX-License-Identifier: Apache-2.0
"""The tail of a rollout, in which engines share requests: some requests move to other engines, some are raced by several."""
