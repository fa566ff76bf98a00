# SPDX-License-Identifier: Apache-2.0
"""The tail of a rollout: which engine gets a request, which requests move, and which are raced by several engines."""
