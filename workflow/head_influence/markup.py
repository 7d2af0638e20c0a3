"""Pieces of HTML: everything that is not markup of our own is escaped here or by the caller."""

import re
from html import escape

NUMBER = re.compile(r"[−-]?[0-9][0-9,]*(?:\.[0-9]+)?(?:e[−+-]?[0-9]+)?")


def sort_key(cell):
    """What a table sorts a cell by: its first number, else its text."""
    text = re.sub(r"<[^>]+>", "", str(cell)).strip()
    found = NUMBER.match(text)
    return found.group().replace("−", "-").replace(",", "") if found else text


def table(columns, rows, note, identity):
    """Return a note and the sortable table that it is about; cells, headings and note are HTML."""
    head = "".join(f'<th scope="col"><button type="button">{column}</button></th>' for column in columns)
    body = "".join(
        "<tr>" + "".join(f'<td data-v="{escape(sort_key(cell))}">{cell}</td>' for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<p class="note" id="{identity}-note">{note}</p><div class="scroll"><table class="sortable" id="{identity}" '
        f'aria-describedby="{identity}-note"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def plain_table(rows):
    """Return a two-column table of names and values, both escaped."""
    body = "".join(f'<tr><th scope="row">{escape(str(k))}</th><td>{escape(str(v))}</td></tr>' for k, v in rows)
    return f'<div class="scroll"><table><tbody>{body}</tbody></table></div>'


def paragraphs(text):
    """Return plain text with blank lines between paragraphs as HTML."""
    return "".join(f"<p>{escape(' '.join(part.split()))}</p>" for part in text.strip().split("\n\n"))
