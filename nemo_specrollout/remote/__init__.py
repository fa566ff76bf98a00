# SPDX-License-Identifier: Apache-2.0
"""Remote drafters, which draft in processes of their own, and the protocol by which they talk to verifiers."""
