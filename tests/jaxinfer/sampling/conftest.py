import numpy as np
import pytest

V = 1000


@pytest.fixture(params=["random", "ties", "holes", "flat", "peaked"])
def logits(request):
    """float32[7, V] of several characters: ties, -inf entries, nearly flat, one dominating token."""
    rng = np.random.default_rng(7)
    x = (rng.normal(size=(7, V)) * 3).astype(np.float32)
    match request.param:
        case "ties":
            x = np.round(x) + np.float32(0)  # no -0, which top_k orders below 0
        case "holes":
            x[rng.random(x.shape) < 0.7] = -np.inf
        case "flat":
            x *= np.float32(1e-3)
        case "peaked":
            x[:, 17] = 60
    return x
