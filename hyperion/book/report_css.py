"""The look of the report: system fonts, light or dark as the reader's machine is set, nothing fetched."""

STYLE = """
:root{--ink:#1b1f24;--soft:#5d6670;--line:#e1e4e8;--page:#f6f7f9;--card:#fff;--accent:#0072B2;--warn:#fff4ec;--edge:#D55E00}
@media(prefers-color-scheme:dark){:root{--ink:#e6e8ea;--soft:#9aa4ae;--line:#30363d;--page:#0f1317;--card:#171c22;
--accent:#56B4E9;--warn:#2b1d12}}
*{box-sizing:border-box}
html{scroll-behavior:smooth}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1120px;margin:0 auto;padding:2.2rem 1.2rem 4rem}
h1{font-size:1.9rem;line-height:1.2;margin:0}
h2{font-size:1.25rem;margin:0 0 .8rem}
h3{font-size:.82rem;font-weight:600;color:var(--soft);margin:0}
.facts,footer{color:var(--soft);margin:.3rem 0 0}
.banner{background:var(--warn);border-left:6px solid var(--edge);padding:.7rem 1rem;font-weight:600;border-radius:4px}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(190px,1fr));gap:.8rem;margin:1.4rem 0}
.card,section:not(.cards){background:var(--card);border:1px solid var(--line);border-radius:10px}
.card{padding:.9rem 1rem;min-width:0}
.card p{margin:.15rem 0 0;font-size:.8rem;color:var(--soft)}
.card .value{font-size:1.55rem;line-height:1.25;font-weight:650;color:var(--ink);white-space:nowrap}
.card .value span{font-size:.85rem;font-weight:500;color:var(--soft)}
.card .limit{display:-webkit-box;-webkit-box-orient:vertical;-webkit-line-clamp:3;overflow:hidden}
.gauge{height:6px;background:var(--line);border-radius:3px;margin:.45rem 0 0;overflow:hidden}
.gauge i{display:block;height:100%;background:var(--accent)}
nav{display:flex;flex-wrap:wrap;gap:.35rem .9rem;margin:0 0 1.4rem}
a{color:var(--accent);text-decoration:none}
a:hover{text-decoration:underline}
section:not(.cards){padding:1.2rem 1.3rem;margin:0 0 1.1rem}
figure{margin:0 0 1.1rem}
img{display:block;max-width:100%;background:#fff;border-radius:6px;padding:.4rem}
figcaption{color:var(--soft);font-size:.88rem;margin-top:.3rem}
details{margin:.4rem 0}
summary{cursor:pointer;font-weight:600;font-size:.9rem;padding:.2rem 0}
.table{overflow-x:auto}
table{border-collapse:collapse;font-size:.84rem;margin:.4rem 0 .8rem;width:100%}
th,td{padding:.32rem .65rem;text-align:left;border-bottom:1px solid var(--line);vertical-align:top}
th{font-weight:600;color:var(--soft)}
td.number,th.number{text-align:right;font-variant-numeric:tabular-nums}
td.number{white-space:nowrap}
.published{border-style:dashed!important}
.halves{display:grid;grid-template-columns:repeat(auto-fit,minmax(320px,1fr));gap:1.4rem}
.half{min-width:0}
.defects{font-size:.84rem;color:var(--soft)}
""".strip()
