# SPDX-License-Identifier: Apache-2.0
"""The part of remote drafting that runs in the policy's engine. It connects to the drafters and reads their draft tokens."""
