# SPDX-License-Identifier: Apache-2.0
"""Defines which tokens a request gets. They follow from the request's seed, and a draft is accepted only if it equals them."""
