"""Public faults that rlloss must not have: ids, what each is about, and the numbers its test has to hold.

Users of other loss code reported them; `test_public_cases.py` finds the tests of each. A case is claimed by a test with
its id in the name (`test_a01_...`) or in its docstring ("Case A01").
"""

from __future__ import annotations

PUBLIC_CASES: dict[str, tuple[str, tuple[float, ...]]] = {
    # Normalisation over micro-batches, ranks, chunks, packs
    "A01": ("the split changes the loss", (1.25, 0.2161662)),
    "A02": ("ranks with few tokens weigh more", (1.5,)),
    "A04": ("sequence parallelism divides once more", (1.0, 100)),
    "A05": ("a masked sample counts", (1.0, 4.0)),
    "A07": ("rejected tokens and the denominator", (0.4910059, 1.2275149)),
    "A08": ("tokens counted over more than one step", (1.0,)),
    "A09": ("the fused path drifts with accumulation", ()),
    "A10": ("chunks are added up", (1.25, 1, 2, 3, 4, 7)),
    "A11": ("an extra term has a denominator of its own", (0.1, 0.0693147)),
    "A12": ("the reduction has no effect", (1.25, 1.5, 2.5, 0.625)),
    "A14": ("masked tokens add to the numerator", (1.0, 0.5, 100.0)),
    "A15": ("a short window is divided by the configured one", (1.0,)),
    "A16": ("normalised twice", (1.0,)),
    # Masked positions and empty batches
    "B01": ("no supervised token: NaN", (0.0,)),
    "B02": ("overflow at a padded position: NaN gradient", (-201.0, -1.0, 0.6321206)),
    "B03": ("NaN in a masked slot", ()),
    "B04": ("NaN at a valid slot is hidden", ()),
    "B06": ("-inf of a filtered token", (-1.0,)),
    "B07": ("entropy of a word of probability 0", (0.5822031, 0.1966119)),
    "B09": ("metrics divide by a masked row's count", ()),
    # Overflow at valid tokens
    "C01": ("one stale token", (-1.2, 3.0, 4.85165e8, -101.0)),
    "C04": ("weight of a long sequence", (0.02, 5000)),
    # Alignment
    "D01": ("first answer token or EOS not trained", (2.0, -10.0)),
    "D04": ("pad id equal to EOS", (5, 2)),
    "D05": ("another ignore index", (-1, 0)),
    # Fused and chunked heads
    "E02": ("upstream gradient other than 1", (3.0, 65536.0, 0.0)),
    "E03": ("backward twice", (2.0,)),
    "E05": ("no_grad and inference mode", (0.6041306,)),
    "E06": ("frozen head or hidden states", (0.6041306,)),
    "E07": ("bias dropped", (2.2595355,)),
    "E08": ("LoRA on the head", (0.8295438,)),
    "E09": ("scale or soft cap dropped", (0.125, 1.0182847, 0.6825573)),
    "E12": ("odd chunk sizes, no token", (4, 3, 1)),
    "E14": ("mixed dtypes", (1e-2,)),
    "E15": ("labels outside the vocabulary", (3, -1)),
    "E18": ("an option is ignored in the fused mode", ()),
    "E19": ("chunk mode saves no memory", (4096, 8, 256)),
    "E20": ("DTensor head", (0.6041306,)),
    "E21": ("head without elements", (0, 2)),
    "E22": ("N*V beyond 2^31", (131072, 16400)),
    "E23": ("liger on the CPU, or not installed", (0.6041306,)),
    "E24": ("compiled anew for each length", (3,)),
    "E25": ("0 in the Triton interpreter", (1.2258632,)),
    "E26": ("per-token output loses its shape", (0.0,)),
    # Temperature and precision
    "F01": ("temperature on one side only", (0.5, -0.0181499, 0.3490122)),
    "F02": ("temperature 0 or below", (0.0, -1.0)),
    "F04": ("bf16 ratios other than 1", (1.0, 1e-3)),
    "F06": ("16-bit accumulation over many tokens", (1_000_000,)),
    # Policy losses and rollout weights
    "G02": ("dual clip not above 1", (0.9, 1.0)),
    "G03": ("clip fraction where nothing binds", (0.25,)),
    "G04": ("value clip fraction of the clipped value", (1.0, 0.2)),
    "G06": ("sequence ratio: product or mean", (1.8221188, 1.2214028)),
    "G09": ("CISPO without its gradient", (1.28, 1.5)),
    "G10": ("old log-probs recomputed", ()),
    "G11": ("rollout weight missing in the fused path", (1.5,)),
    "G12": ("KL metric of another ratio", (0.1, 0.2, 0.3)),
    # KL and entropy
    "H01": ("KL with the wrong sign", (1.0, 0.5, 0.3678794, 0.6321206)),
    "H04": ("unmasked mean of KL", (0.1, 50.05)),
    "H05": ("sign of the entropy bonus", (-0.0693147,)),
    "H06": ("entropy and KL under another mask", ()),
    "H07": ("KL coefficient unused", ()),
    "H08": ("reported KL is another estimator", (0.3678794,)),
    "H09": ("KL off, reference missing or NaN", ()),
    # Advantages
    "I01": ("a masked value bootstraps", (0.95, 100.0)),
    "I03": ("group of one, NaN reward", ()),
    "I05": ("whitening of one token and of none", ()),
    "I07": ("long answers counted many times", (-0.5,)),
    "I09": ("eight rewards", (0.7142857, -0.4285714, 1.2076124, -0.7245674)),
    # Value loss
    "J02": ("clip around the returns", (0.2,)),
    "J03": ("split of the value loss", (0.875,)),
    # Metrics
    "K03": ("logged loss depends on the split", (1.25,)),
    "K04": ("only the last chunk is logged", (0.5,)),
    "K05": ("metrics hold a graph", ()),
    # Ranks out of step
    "L01": ("a rank with nothing to train", (1.5,)),
    "L02": ("no token anywhere, and nobody can see it", (0,)),
    # Derived
    "M01": ("padding changes the loss", ()),
    "M02": ("order changes the loss", ()),
    "M03": ("activation checkpointing", ()),
    "M06": ("types and shapes of labels, masks, advantages", ()),
    "M07": ("gradients of inputs", ()),
    "M08": ("dtype of the loss", ()),
    "M09": ("A12 to A16 with accumulation on two ranks", (1.25, 1.5, 2.5, 0.625)),
    "M10": ("names of policy losses", ()),
}
