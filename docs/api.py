"""Write the API page to build/docs: `make docs`. Formulas become MathML, so the page needs no network."""

import html
import re
from pathlib import Path

import pdoc
from latex2mathml.converter import convert

FOLDER = Path(__file__).resolve().parents[1] / "build" / "docs"

# Attributes without a docstring are arguments of the constructor, which documents them.
pdoc.render.configure(docformat="google", include_undocumented=False)
pdoc.pdoc("layernorm_ext", output_directory=FOLDER)
page = FOLDER / "layernorm_ext.html"
text = page.read_text()
text = re.sub(r"\$\$(.+?)\$\$", lambda found: convert(html.unescape(found[1]), display="block"), text, flags=re.S)
page.write_text(text.replace(" </a>", "</a>"))  # rst links end in a space before their address
print(page)
