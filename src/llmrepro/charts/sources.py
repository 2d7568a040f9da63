"""How a chart tells by colour and shape where a number is from: found here, published, or computed."""

from llmrepro.charts.drawings import COLOURS

HERE = {"color": COLOURS[0], "marker": "o"}
PUBLISHED = {"color": COLOURS[1], "marker": "D"}
ELSEWHERE = {"color": COLOURS[1], "marker": "s"}  # published, in other conditions than the recipe's
COMPUTED = {"color": COLOURS[4], "marker": "X"}
