"""The look of an executed notebook's page. JupyterLab's own style sheets are a quarter of a megabyte a page, most of it for
an editor that a page has not.
"""

STYLE = """
:root{--jp-cell-editor-background:#f6f7f9;--jp-cell-editor-active-background:#fff;--jp-mirror-editor-comment-color:#408080;
--jp-mirror-editor-error-color:#c00;--jp-mirror-editor-keyword-color:#008000;--jp-mirror-editor-number-color:#080;
--jp-mirror-editor-operator-color:#a2f;--jp-mirror-editor-punctuation-color:#05a;--jp-mirror-editor-string-color:#ba2121;
--jp-mirror-editor-variable-color:#1b1f24;--soft:#5d6670;--line:#e1e4e8;
--code:ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace}
*{box-sizing:border-box}
body{margin:0;background:#fff;color:#1b1f24;font:15px/1.55 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1100px;margin:0 auto;padding:1.6rem 1.2rem 4rem}
h1{font-size:1.9rem;line-height:1.25;margin:.6rem 0}
h2{font-size:1.4rem;margin:1.8rem 0 .5rem}
h3{font-size:1.1rem;margin:1.2rem 0 .4rem}
p{margin:.5rem 0}
a{color:#0072B2;text-decoration:none}
a:hover{text-decoration:underline}
.anchor-link,.jp-Collapser{display:none}
.jp-Cell{margin:.35rem 0}
.jp-InputArea,.jp-OutputArea-child{display:flex;align-items:flex-start}
.jp-InputPrompt,.jp-OutputPrompt{flex:0 0 4.4rem;color:var(--soft);font:12px/1.7 var(--code);text-align:right;padding-right:.7rem}
.jp-MarkdownOutput,.jp-InputArea-editor,.jp-OutputArea-output{flex:1 1 0;min-width:0}
.jp-InputArea-editor{background:var(--jp-cell-editor-background);border:1px solid var(--line);border-radius:4px;overflow-x:auto}
pre{margin:0;font:13px/1.45 var(--code)}
.highlight pre{padding:.45rem .6rem}
.jp-RenderedText{overflow-x:auto}
.jp-RenderedText pre{white-space:pre-wrap;overflow-wrap:anywhere}
[data-mime-type$=stderr]{background:#fff4ec}
code{font:.9em var(--code);background:var(--jp-cell-editor-background);padding:.1em .25em;border-radius:3px}
.highlight code,pre code{padding:0;background:none}
.jp-RenderedMarkdown pre{background:var(--jp-cell-editor-background);padding:.45rem .6rem;overflow-x:auto}
img{max-width:100%}
.jp-RenderedHTML{overflow-x:auto}
table{border-collapse:collapse;font-size:.84rem;margin:.5rem 0}
th,td{padding:.3rem .6rem;text-align:left;border-bottom:1px solid var(--line);vertical-align:top}
tbody tr:nth-child(even){background:#f8f9fa}
th{font-weight:600}
td.number,th.number{text-align:right;font-variant-numeric:tabular-nums}
blockquote{margin:.5rem 0;padding-left:.8rem;border-left:3px solid var(--line);color:var(--soft)}
.ansi-red-fg,.ansi-red-intense-fg{color:#c00}
.ansi-green-fg,.ansi-green-intense-fg{color:#080}
.ansi-blue-fg,.ansi-cyan-fg{color:#05a}
.ansi-bold{font-weight:700}
@media print{a{color:inherit}}
""".strip()
