# SPDX-License-Identifier: Apache-2.0
"""The verifier side of remote drafters: starts their processes and takes their draft stream."""
