"""Metrics by name. A config may also give a dotted path, "my_package.my_module:my_metric".

A metric is built once with its args and called with a list of finished episodes. It returns
{key: (one value per episode or None, value of all of them)}.
"""

METRICS: dict[str, str] = {
    "bag_of_words": "envs.metrics.sentiment:BagOfWordsSentiment",
    "dates": "envs.metrics.synthetic:dates",
    "diversity": "envs.metrics.diversity:diversity",
    "increasing_numbers": "envs.metrics.synthetic:increasing_numbers",
    "length": "envs.metrics.synthetic:length",
    "reward": "envs.metrics.reward:RewardMetric",
}
