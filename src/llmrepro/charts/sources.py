"""How a chart tells by colour and shape where a number is from: found here, published, or computed."""

from llmrepro.charts.drawings import COLOURS

HERE = {"color": COLOURS[0], "marker": "o"}
PUBLISHED = {"color": COLOURS[1], "marker": "D"}
COMPUTED = {"color": COLOURS[4], "marker": "X"}
