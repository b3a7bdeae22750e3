"""Some of a product's cases, which have between them every pair of values that all of them have.

A fault that shows in one case alone of a product of axes nearly always needs the values of one axis or of two.
"""

import random
from collections import defaultdict
from functools import cache
from itertools import combinations

ORDERS = 30  # in which a choice of few cases is looked for


def choose(cases, axes, together=2):
    """Those of `cases` that are kept, in their order: `axes` says of a case its (axis, value), axes in a fixed order.
    `together` is how many axes have every combination that occurs: 1, 2 ...

    Not the smallest choice there is, but found in a few passes: those first that bring most.
    """
    places = defaultdict(lambda: len(places))  # numbers in place of values: hashed in less time
    bits = defaultdict(lambda: 1 << len(bits))  # of combinations
    values = ([places[value] for value in axes(case)] for case in cases)
    brought = [sum({bits[combination] for combination in combinations(own, together)}) for own in values]
    missing, kept = (1 << len(bits)) - 1, set()
    gains = [own.bit_count() for own in brought]  # when they were last looked at; they only become fewer
    for enough in range(max(gains, default=0), 0, -1):
        for n in (n for n, gain in enumerate(gains) if gain == enough):
            gains[n] = (brought[n] & missing).bit_count()
            if gains[n] == enough:
                kept.add(n)
                missing &= ~brought[n]
    return [case for n, case in enumerate(cases) if n in kept]


def part(cases, axes, share, seed):
    """A share of the cases, in their order, which the seed draws: among them every value of every axis."""
    order = random.Random(seed).sample(cases, len(cases))
    kept = set(choose(order, axes, 1))
    rest = [case for case in order if case not in kept]
    kept.update(rest[: max(0, round(share * len(cases)) - len(kept))])
    return [case for case in cases if case in kept]


def axes_of(given, joined=()):
    """(axis, value) of a test's parameters: a tuple's are an axis each, those of `joined` names one in all."""
    yield joined, tuple(repr(given[name]) for name in joined if name in given)
    for name in sorted(given.keys() - set(joined)):
        values = given[name] if isinstance(given[name], tuple) else (given[name],)
        for n, value in enumerate(values):
            yield (name, n), repr(value)


def instances(kernels, together=2, seed=None):
    """Instances of one kernel that have between them every value of every template argument, or every pair of them:
    the fewest that were found, since each costs a compilation. With a seed, some that depend on it.
    """
    order = kernels if seed is None else random.Random(seed).sample(kernels, len(kernels))
    return [*_instances(tuple(order), min(together, len(kernels[0].template)))]


@cache
def _instances(kernels, together):
    if not together:
        return kernels
    arguments = [[*enumerate(kernel.template)] for kernel in kernels]
    numbers, draw = range(len(kernels)), random.Random(0)
    orders = [numbers, *(draw.sample(numbers, len(numbers)) for _ in range(ORDERS))]
    fewest = min((choose(order, arguments.__getitem__, together) for order in orders), key=len)
    return [kernels[n] for n in sorted(fewest)]
