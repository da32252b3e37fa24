"""The style sheet of the report: light and dark, wide and narrow. Green is for wins alone."""

STYLE = """
:root { --ink: #1c2430; --soft: #5b6675; --line: #dfe4ea; --paper: #ffffff; --band: #f5f7f9; --bar: #b4bfcc;
        --ours: #5878b0; --win: #0b7a5f; --loss: #96560a; --bad: #b3261e; color-scheme: light dark; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6eaf0; --soft: #9aa7b5; --line: #303946; --paper: #12171e; --band: #1a212b; --bar: #4b5868;
          --ours: #7d9bd2; --win: #3ecfa6; --loss: #efb35c; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 64rem; padding: 2.5rem 1.5rem 4rem;
       background: var(--paper); color: var(--ink);
       font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .25rem; }
h2 { font-size: 1.3rem; margin: 3rem 0 .25rem; padding-top: 1.25rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.75rem 0 .5rem; }
p { margin: .25rem 0 .75rem; overflow-wrap: anywhere; }
a { color: inherit; }
nav { margin: 1.5rem 0 0; font-size: .9rem; }
nav ul { margin: .25rem 0 0; padding-left: 1.25rem; }
.soft { color: var(--soft); font-size: .9rem; }
.faster { color: var(--win); }
.slower { color: var(--loss); }
.wrong, .bad { color: var(--bad); }
.cards { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1.25rem 0; }
.card { flex: 1 1 12rem; background: var(--band); border-radius: 8px; padding: .75rem 1rem; }
.card b { display: block; font-size: 1.5rem; line-height: 1.25; }
.card span { color: var(--soft); font-size: .85rem; }
.note-box { border-left: 3px solid var(--loss); padding: .25rem 0 .25rem .75rem; margin: .75rem 0; }
.scroll { overflow-x: auto; margin-bottom: 1rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--soft); vertical-align: bottom; }
th, td { padding: .4rem .75rem .4rem 0; border-bottom: 1px solid var(--line); }
td { vertical-align: top; }
td small { display: block; color: var(--soft); font-weight: 400; }
td.number, th.number { text-align: right; }
td.number { white-space: nowrap; }
td:last-child, th:last-child { padding-left: .5rem; padding-right: 0; }
tr.ours td { font-weight: 600; }
tr.win td { color: var(--win); font-weight: 600; }
tr.wrong td { color: var(--bad); }
code, pre { font: .85rem/1.45 ui-monospace, "DejaVu Sans Mono", monospace; }
code { overflow-wrap: anywhere; }
pre { background: var(--band); padding: .75rem 1rem; border-radius: 6px; overflow-x: auto; margin: .5rem 0; }
pre.command { white-space: pre-wrap; overflow-wrap: anywhere; }
summary { cursor: pointer; color: var(--soft); font-size: .9rem; }
.bars { margin: 0 0 1rem; font-size: .85rem; }
.bars .row { display: grid; grid-template-columns: 15rem 1fr 11rem; gap: .75rem; align-items: center;
             min-height: 1.75rem; }
.bars .label { text-align: right; }
.bars .note { color: var(--soft); font-variant-numeric: tabular-nums; white-space: nowrap; }
.bars .none { grid-column: 2 / 4; color: var(--soft); }
.bars .track { position: relative; height: 1.1rem; }
.bars .bar { position: absolute; inset: 0 auto 0 0; border-radius: 2px; background: var(--bar); }
.bars .ours { background: var(--ours); }
.bars .win { background: var(--win); }
.bars .whisker { position: absolute; top: 25%; bottom: 25%; border: solid var(--ink); border-width: 0 1.5px;
                 background: linear-gradient(var(--ink), var(--ink)) center / 100% 1.5px no-repeat; }
@media (max-width: 640px) {
  body { padding: 1.25rem 1rem 3rem; }
  .bars .row { grid-template-columns: 1fr 11rem; gap: 0 .5rem; margin-bottom: .35rem; }
  .bars .label { grid-column: 1 / 3; text-align: left; }
  .bars .none { grid-column: 1 / 3; }
}
"""
