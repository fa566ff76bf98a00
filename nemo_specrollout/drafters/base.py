# SPDX-License-Identifier: Apache-2.0
"""What every drafter is: something that reads the batch's text and proposes how each request goes on.

Shapes: B requests of the batch, K draft positions, L longest sequence.
"""

import numpy as np

# A proposal grades each token's evidence: four grades of the candidate's share within four of the context's length.
# The draft board learns what share of each level comes true, and starts from what is written here.
LEVEL_PRIORS = np.tile(np.array([0.3, 0.45, 0.6, 0.8]), 4)
NUM_LEVELS = len(LEVEL_PRIORS)
NUM_RELATIONS = 4
"""How a draft token relates to the other side's proposal. One side is the drafter with weights, the other the text drafters.

0: the other side proposes nothing. 1: it proposes the same token. 2: it proposes another token after the same draft tokens.
3: its proposal ended or parted before. The board learns a rate for each relation."""
EVIDENCE_WINDOW = 512.0
"""Number of recent draft tokens that the acceptance rate of a level is estimated from, approximately. For draft positions it
is the number of recent proposals. Later positions are tried less often, but their evidence is no older."""
REQUEST_DECAY = 0.94
"""The weight that a draft token of a request leaves to those before it in the request's factor."""
FORETOLD_DECAY = 0.998
"""The weight that a step leaves to how well factors predicted hits in the steps before."""
# What is believed at first: the rate of the first draft position, and how many tokens a belief weighs. A later position is
# believed to be like the one before it. No draft is surer than MAX_RATE.
PRIOR_RATE, PRIOR_STRENGTH, MAX_RATE = 0.6, 4.0, 0.99
LEAST_WORTH = 1e-3
"""What a draft token that is not worth its row counts for, of its survival, where proposals are compared: such tokens decide
where there is nothing better."""
OUTLOOK_DECAY = 0.875
"""The weight that a step leaves to earlier steps in the usual survival of text drafts. A plan holds for several steps, so a
single good proposal must not decide it."""
KEPT_DECAY = 0.98
"""The weight that a step leaves to what was learned before of promises kept: the hits that text drafts bring, over those that
they promise, where the drafter with weights is silent."""
OUTLOOK_RETURN = 0.97
"""The weight of what is expected of the drafter with weights, in a step that does not ask it. The rest is what is usual. So a
few bad drafts do not silence it for the rest of a request."""
TRACED_STEPS = 1 << 16
"""Steps of which counts are kept."""
