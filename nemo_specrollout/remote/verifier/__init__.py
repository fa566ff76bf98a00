# SPDX-License-Identifier: Apache-2.0
"""The verifier side of remote drafters, which connects to them and reads their draft stream."""
