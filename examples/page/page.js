'use strict';
// Draws what chorus-page has put into the element "data". Text from a run is only ever set as text.
(() => {
  const data = JSON.parse(document.getElementById('data').textContent);
  const runs = data.runs;
  const buckets = ['#0072b2', '#e69f00', '#009e73', '#cc79a7', '#56b4e9', '#d55e00', '#b8a800', '#8c8c8c'];
  const kinds = ['parameters', 'gradients', 'optimizer', 'buckets', 'activations'];
  const kindColour = {parameters: 'var(--parameters)', gradients: 'var(--gradients)', optimizer: 'var(--optimizer-memory)',
    buckets: 'var(--buckets)', activations: 'var(--activations)'};
  const most = 5000;
  let marks = 0;

  // ---- elements
  const fill = (node, attributes, children) => {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined) continue;
      if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
      else node.setAttribute(name, value);
    }
    for (const child of children.flat()) if (child !== null && child !== undefined) node.append(child);
    return node;
  };
  const html = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
  const svg = (tag, attributes, ...children) =>
    fill(document.createElementNS('http://www.w3.org/2000/svg', tag), attributes, children);
  const section = (name) => document.getElementById(name);
  const titled = (text) => svg('title', {}, text);
  const scroll = (...children) => html('div', {class: 'scroll', tabindex: '0', role: 'group', 'aria-label': 'scrolls sideways'}, ...children);

  // ---- numbers
  const digits = (x, n = 3) => Number(x.toPrecision(n)).toString();
  const time = (us) => us >= 1e6 ? digits(us / 1e6) + ' s' : us >= 1000 ? digits(us / 1000) + ' ms' : digits(us) + ' µs';
  const size = (bytes) => bytes >= 2 ** 30 ? digits(bytes / 2 ** 30) + ' GiB' : bytes >= 2 ** 20 ? digits(bytes / 2 ** 20) + ' MiB'
    : bytes >= 1024 ? digits(bytes / 1024) + ' KiB' : digits(bytes) + ' B';
  const exact = (n) => Math.round(n).toLocaleString('en').replaceAll(',', ' ');
  const percent = (x) => digits(100 * x) + ' %';

  // ---- runs
  const lane = (event) => event.tid - 10 * event.pid;
  const ends = (event) => event.ts + (event.dur || 0);
  for (const run of runs) {
    run.names = {};
    run.spans = [], run.instants = [], run.memory = [], run.arrows = new Map();
    for (const event of run.events) {
      if (event.ph === 'M' && event.name === 'process_name') run.names[event.pid] = event.args.name;
      else if (event.ph === 'X') run.spans.push(event);
      else if (event.ph === 'i') run.instants.push(event);
      else if (event.ph === 'C' && event.name === 'memory, bytes') run.memory.push(event);
      else if (event.ph === 's' || event.ph === 'f') {
        const key = JSON.stringify([event.cat, event.name, event.id]);
        run.arrows.set(key, {...run.arrows.get(key), [event.ph]: event});
      }
    }
    run.pids = [...new Set([...Object.keys(run.names).map(Number), ...run.spans.map((s) => s.pid)])].sort((a, b) => a - b);
    run.steps = [...new Set(run.spans.filter((s) => s.cat === 'step').map((s) => s.args.step))].sort((a, b) => a - b);
    run.window = (step, pid) => {
      const own = run.spans.filter((s) => s.cat === 'step' && s.args.step === step && (pid === undefined || s.pid === pid));
      return own.length ? [Math.min(...own.map((s) => s.ts)), Math.max(...own.map(ends))] : [0, 1];
    };
  }
  const order = {single: 0, dp: 1, ddp: 2};
  const shown = [...runs].sort((a, b) => (order[a.metadata.policy] ?? 9) - (order[b.metadata.policy] ?? 9));

  const details = document.getElementById('details');
  const tell = (text) => { details.textContent = text; };

  // Arrow keys go from mark to mark within a picture: one of them can be reached by Tab.
  const roving = (picture) => {
    const all = [...picture.querySelectorAll('.mark')];
    all.forEach((mark, i) => {
      mark.setAttribute('tabindex', i === 0 ? '0' : '-1');
      mark.addEventListener('focus', () => tell(mark.dataset.text));
      mark.addEventListener('mouseenter', () => tell(mark.dataset.text));
      mark.addEventListener('keydown', (event) => {
        const to = {ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: all.length - 1}[event.key];
        let next = all[to];
        if (event.key === 'ArrowDown' || event.key === 'ArrowUp') {
          const down = event.key === 'ArrowDown';
          const rows = all.filter((m) => down ? +m.dataset.row > +mark.dataset.row : +m.dataset.row < +mark.dataset.row);
          const row = rows.length ? (down ? Math.min : Math.max)(...rows.map((m) => +m.dataset.row)) : -1;
          next = rows.filter((m) => +m.dataset.row === row)
            .sort((a, b) => Math.abs(a.dataset.x - mark.dataset.x) - Math.abs(b.dataset.x - mark.dataset.x))[0];
        }
        if (!next) return;
        event.preventDefault();
        mark.setAttribute('tabindex', '-1');
        next.setAttribute('tabindex', '0');
        next.focus();
      });
    });
  };
  const mark = (node, text, row, x) => {
    node.classList.add('mark');
    node.setAttribute('role', 'img');
    node.setAttribute('aria-label', text);
    node.dataset.text = text;
    node.dataset.row = row;
    node.dataset.x = x;
    node.append(titled(text));
    ++marks;
    return node;
  };
  const hatch = (id) => svg('defs', {}, svg('pattern', {id, width: 6, height: 6, patternUnits: 'userSpaceOnUse',
    patternTransform: 'rotate(45)'}, svg('rect', {width: 6, height: 6, fill: 'var(--wash)'}),
    svg('rect', {width: 2.4, height: 6, fill: 'var(--soft)'})),
    svg('marker', {id: id + '-head', viewBox: '0 0 8 8', refX: 7, refY: 4, markerWidth: 6, markerHeight: 6, orient: 'auto'},
      svg('path', {d: 'M0 0L8 4L0 8z', fill: 'var(--ink)'})));
  const table = (caption, head, rows) => html('div', {class: 'scroll', tabindex: '0', role: 'group', 'aria-label': caption},
    html('table', {}, html('caption', {}, caption),
      html('thead', {}, html('tr', {}, ...head.map((name) => html('th', {scope: 'col'}, name)))),
      html('tbody', {}, ...rows.map((row) => html('tr', {}, ...row.map((cell) => html('td', {}, cell)))))));
  const behind = (summary, ...children) => html('details', {}, html('summary', {}, summary), ...children);
  // A scale of round numbers from 0 to `top`, at most seven.
  const ticks = (top) => {
    const rough = top / 6, ten = 10 ** Math.floor(Math.log10(rough || 1));
    const step = [1, 2, 5, 10].map((f) => f * ten).find((f) => f >= rough) || 1;
    return Array.from({length: Math.floor(top / step + 1e-9) + 1}, (_, i) => i * step);
  };

  // ---- 1 what happened
  const happened = section('happened');
  const links = {happened: 'what happened', timeline: 'timeline', links: 'links', memory: 'memory', ring: 'ring',
    gradients: 'gradients', formulas: 'formulas'};
  const sentence = (each) => html('li', {}, each.text + ' ',
    each.section && each.section !== 'happened' ? html('a', {href: '#' + each.section}, links[each.section]) : null,
    each.figures ? html('span', {class: 'figures'}, each.figures) : null);
  happened.append(table('Each run, of its median step; for times the slowest device counts.',
    ['run', 'devices', 'step', 'computing', 'communicating', 'exposed wait', 'hidden', 'sent', 'peak of device 0'],
    shown.map((run) => {
      const facts = run.facts;
      const sent = (facts.links || []).reduce((sum, link) => sum + link.bytes, 0);
      const peak = (facts.peak || [])[0];
      const longest = (list) => list && list.length ? time(Math.max(...list)) : '–';
      return [run.name, run.metadata.devices, time(facts.step_us), longest(facts.compute_us), longest(facts.communication_us),
        longest(facts.exposed_us), facts.hidden === null || facts.hidden === undefined ? '–' : percent(facts.hidden), size(sent),
        peak ? size(Object.values(peak).reduce((a, b) => a + b, 0)) : '–'];
    })));
  happened.append(html('div', {class: 'columns'},
    html('div', {}, ...(data.comparison && data.comparison.length ? [html('h3', {}, 'Side by side'),
      html('ul', {}, ...data.comparison.map(sentence))] : []),
      ...shown.flatMap((run) => run.sentences && run.sentences.length
        ? [html('h3', {}, run.name), html('ul', {}, ...run.sentences.map(sentence))] : [])),
    html('div', {}, ...shown.flatMap((run) => run.advice && run.advice.length
      ? [html('h3', {}, 'Advice for ' + run.name), html('ul', {}, ...run.advice.map(sentence))] : []))));
  if (data.left_out) happened.append(html('p', {class: 'note'}, data.left_out));

  // ---- 2 timeline
  const timeline = section('timeline');
  const left = 118, wide = 1180, rowHeight = 17;
  const bucketOf = (event) => event.args && event.args.bucket >= 0 ? event.args.bucket : null;
  const colour = (event) => bucketOf(event) === null ? 'var(--copy)' : buckets[bucketOf(event) % buckets.length];
  const rowsOf = [
    {name: 'computing', has: (s) => ['forward', 'backward', 'optimizer', 'loader'].includes(s.cat)},
    {name: 'communication', has: (s) => s.cat === 'comm' || s.cat === 'copy'},
    {name: 'exposed wait', has: (s) => s.cat === 'wait'}];
  const chosen = new Map(runs.map((run) => [run, run.median_step ?? run.steps[0]]));
  const pictures = html('div');
  const cursors = [];
  const moveCursors = (run, at) => {
    for (const cursor of cursors) {
      const x = cursor.run === run && at !== null ? cursor.x(at) : -10;
      cursor.line.setAttribute('x1', x);
      cursor.line.setAttribute('x2', x);
    }
  };
  const follow = (picture, run, fromX, toX, span) => picture.addEventListener('pointermove', (event) => {
    const box = picture.getBoundingClientRect();
    const x = (event.clientX - box.left) * picture.viewBox.baseVal.width / box.width;
    moveCursors(run, x >= fromX && x <= toX ? (x - fromX) / (toX - fromX) * span : null);
  });
  const drawTimelines = () => {
    pictures.textContent = '';
    const longest = Math.max(...shown.map((run) => { const [a, b] = run.window(chosen.get(run)); return b - a; }));
    shown.forEach((run, number) => {
      const [begin, end] = run.window(chosen.get(run));
      const scale = (us) => left + (us - begin) / longest * (wide - left - 12);
      const pids = run.pids.slice(0, 16);
      const groups = pids.length * 3, height = 26 + groups * rowHeight + pids.length * 7;
      const yOf = (pid, row) => 20 + pids.indexOf(pid) * (3 * rowHeight + 7) + row * rowHeight;
      const picture = svg('svg', {viewBox: `0 0 ${wide} ${height}`, width: wide, height, role: 'group',
        'aria-label': `timeline of ${run.name}, step ${chosen.get(run)}`}, hatch('hatch' + number));
      for (const tick of ticks(longest)) {
        const x = scale(begin + tick);
        picture.append(svg('line', {class: 'grid', x1: x, x2: x, y1: 16, y2: height - 4}),
          svg('text', {class: 'soft', x, y: 11, 'text-anchor': 'middle'}, tick === 0 ? '0' : time(tick)));
      }
      pids.forEach((pid) => {
        rowsOf.forEach((row, r) => {
          const y = yOf(pid, r);
          picture.append(svg('rect', {class: 'frame', x: left, y, width: wide - left - 12, height: rowHeight - 2}),
            svg('text', {class: 'soft', x: left - 6, y: y + 11.5, 'text-anchor': 'end'}, r === 0 ? (run.names[pid] || pid) : row.name));
          let drawn = -1;
          const spans = run.spans.filter((s) => s.pid === pid && row.has(s) && ends(s) > begin && s.ts < end)
            .sort((a, b) => a.ts - b.ts || ends(b) - ends(a));
          for (const span of spans) {
            const x = scale(Math.max(span.ts, begin)), w = scale(Math.min(ends(span), end)) - x;
            if (w < 0.6 && x < drawn) continue;  // part of what is drawn already
            if (marks > most) break;
            const outer = span.name === 'DataParallel forward';
            const kind = span.cat === 'comm' ? null : span.cat;
            const text = `${run.names[pid] || pid}: ${span.cat === 'wait' ? 'waits for ' : ''}${span.name}, ${time(span.dur)}, from ${time(span.ts - begin)} on` +
              (span.args && span.args.bytes !== undefined ? `, ${size(span.args.bytes)}` : '') +
              (span.args && span.args.algorithm ? `, by ${span.args.algorithm}` : '');
            picture.append(mark(svg('rect', {class: kind === 'wait' || kind === null ? '' : kind, x, y: y + 1, rx: 1.5,
              width: Math.max(w, 0.8), height: rowHeight - 4,
              style: span.cat === 'wait' ? `fill:url(#hatch${number})` : span.cat === 'comm' ? `fill:${colour(span)}` : outer ? 'opacity:.35' : null}),
              text, pids.indexOf(pid) * 3 + r, x));
            const label = span.cat === 'comm' && bucketOf(span) !== null ? String(bucketOf(span)) : span.name;
            if (w > 6.6 * label.length + 6 && !outer && span.cat !== 'wait' && !(span.name === 'backward' && spans.some((s) => s !== span && s.name === 'backward' && s.ts >= span.ts && ends(s) <= ends(span))))
              picture.append(svg('text', {x: x + 4, y: y + 11.5, style: 'fill:#fff;pointer-events:none;font-weight:600;paint-order:stroke;stroke:rgb(0 0 0/.35);stroke-width:1.6px'}, label));
            drawn = Math.max(drawn, x + w);
          }
        });
      });
      let arrows = 0;
      for (const {s, f} of run.arrows.values()) {
        if (!s || !f || s.cat === 'ring' || s.ts < begin || f.ts > end || s.pid === f.pid || ++arrows > 60) continue;
        if (!pids.includes(s.pid) || !pids.includes(f.pid)) continue;
        const row = (event) => lane(event) === 5 ? 1 : lane(event) === 6 ? 2 : 0;
        const x1 = scale(s.ts), y1 = yOf(s.pid, row(s)) + rowHeight / 2, x2 = scale(f.ts), y2 = yOf(f.pid, row(f)) + rowHeight / 2;
        picture.append(svg('path', {class: 'arrow', d: `M${x1} ${y1}C${x1 + 10} ${y1} ${x2 - 10} ${y2} ${x2} ${y2}`, 'marker-end': `url(#hatch${number}-head)`},
          titled(s.cat === 'late' ? 'the others could go on when this one had come' : `${s.name} from ${run.names[s.pid]} to ${run.names[f.pid]}`)));
      }
      const line = svg('line', {class: 'cursor', x1: -10, x2: -10, y1: 16, y2: height - 4});
      picture.append(line);
      cursors.push({run, line, x: (at) => scale(begin + at)});
      follow(picture, run, left, wide - 12, longest);
      picture.addEventListener('pointerleave', () => moveCursors(run, null));
      pictures.append(html('h3', {}, `${run.name}, step ${chosen.get(run)}: ${time(end - begin)}`), scroll(picture));
      if (run.pids.length > pids.length) pictures.append(html('p', {class: 'note'}, `The first ${pids.length} of ${run.pids.length} are drawn.`));
      roving(picture);
    });
  };
  const swatch = (style, cls) => svg('svg', {width: 14, height: 12, 'aria-hidden': 'true'}, svg('rect', {width: 14, height: 12, rx: 2, style, class: cls}));
  const legend = html('div', {class: 'legend'},
    ...['forward', 'backward', 'optimizer', 'loader'].map((name) => html('span', {}, swatch(null, name), name)),
    html('span', {}, svg('svg', {width: 14, height: 12, 'aria-hidden': 'true'}, hatch('hatchL'), svg('rect', {width: 14, height: 12, style: 'fill:url(#hatchL)'})), 'exposed wait'),
    html('span', {}, swatch('fill:var(--copy)'), 'copies and messages without a bucket'),
    ...[...new Set(runs.flatMap((run) => run.spans.map(bucketOf).filter((b) => b !== null)))].sort((a, b) => a - b).slice(0, 8)
      .map((b) => html('span', {}, swatch(`fill:${buckets[b % buckets.length]}`), `bucket ${b}`)));
  timeline.append(html('p', {}, 'One step of each run on one time scale. Where communication lies under backward it costs nothing; ' +
    'where the wait is hatched, the program has nothing else to do. Arrows go from who came last to who had waited, and from device to device.'), legend);
  const longestRun = shown.reduce((a, b) => a.steps.length >= b.steps.length ? a : b, shown[0]);
  if (longestRun && longestRun.steps.length > 1) {
    const label = html('output', {});
    const slider = html('input', {type: 'range', min: 0, max: longestRun.steps.length - 1, value: Math.max(0, longestRun.steps.indexOf(chosen.get(longestRun))),
      'aria-label': 'step that is shown', oninput: () => {
        for (const run of runs) chosen.set(run, run.steps[Math.min(+slider.value, run.steps.length - 1)]);
        label.textContent = 'step ' + chosen.get(longestRun);
        cursors.length = 0;
        marks = 0;
        drawTimelines();
        drawMemory();
      }});
    label.textContent = 'step ' + chosen.get(longestRun) + ', the median';
    timeline.append(html('div', {class: 'controls'}, html('label', {}, 'Step ', slider, label)));
  }
  timeline.append(pictures);
  timeline.append(behind('The spans as a table', ...shown.map((run) => {
    const [begin, end] = run.window(chosen.get(run));
    const spans = run.spans.filter((s) => s.ts >= begin && ends(s) <= end && s.cat !== 'ring').slice(0, 120);
    return table(`${run.name}, step ${chosen.get(run)}`, ['who', 'lane', 'what', 'from', 'takes'],
      spans.map((s) => [run.names[s.pid] || s.pid, s.cat, s.name, time(s.ts - begin), time(s.dur)]));
  })));

  // ---- 3 links
  const linkSection = section('links');
  linkSection.append(html('p', {}, 'Bytes of one step from each device or rank (rows) to each other one (columns), as counted, beside what the formula says. ' +
    'Control messages, by which ranks tell each other of batches, stand apart: no formula has them.'));
  for (const run of shown) {
    const all = run.facts.links || [];
    linkSection.append(html('h3', {}, run.name));
    if (!all.length) {
      linkSection.append(html('p', {class: 'note'}, run.metadata.devices > 1 ? 'Nothing was sent in the recorded steps.' : 'One device: nothing moves.'));
      continue;
    }
    const n = run.metadata.devices, block = Math.max(1, Math.ceil(n / 16)), side = Math.ceil(n / block);
    const sums = Array.from({length: side}, () => Array(side).fill(0));
    for (const link of all) if (link.kind !== 'control' && link.from < n && link.to < n)
      sums[Math.floor(link.from / block)][Math.floor(link.to / block)] += link.bytes;
    const top = Math.max(1, ...sums.flat());
    const name = (i) => block === 1 ? String(i) : `${i * block}–${Math.min(n, (i + 1) * block) - 1}`;
    const messages = html('div', {'aria-live': 'polite'});
    const showMessages = (from, to) => {
      messages.textContent = '';
      const rows = all.filter((l) => Math.floor(l.from / block) === from && Math.floor(l.to / block) === to)
        .map((l) => [l.from + ' → ' + l.to, l.kind, exact(l.bytes), l.formula === null ? '–' : exact(l.formula)]);
      messages.append(table(`From ${name(from)} to ${name(to)}`, ['link', 'what', 'bytes', 'formula'], rows));
    };
    const matrix = html('table', {}, html('caption', {}, 'Without control messages' + (block > 1 ? `; blocks of ${block}` : '')),
      html('thead', {}, html('tr', {}, html('th', {scope: 'col'}, 'from \\ to'), ...sums.map((_, i) => html('th', {scope: 'col'}, name(i))))),
      html('tbody', {}, ...sums.map((row, from) => html('tr', {}, html('th', {scope: 'row'}, name(from)), ...row.map((bytes, to) =>
        html('td', {class: 'matrix', 'data-from': from, 'data-to': to, 'data-bytes': bytes,
          style: bytes ? `background:color-mix(in srgb, var(--gradients) ${Math.round(8 + 50 * bytes / top)}%, transparent)` : ''},
        bytes ? html('button', {onclick: () => showMessages(from, to), 'aria-label': `from ${name(from)} to ${name(to)}: ${exact(bytes)} bytes; show what`}, size(bytes)) : '·'))))));
    linkSection.append(scroll(matrix), messages);
    const byKind = new Map();
    for (const link of all) {
      const key = JSON.stringify([link.from, link.kind]);
      const sum = byKind.get(key) || {from: link.from, kind: link.kind, bytes: 0, formula: 0, rule: link.rule};
      sum.bytes += link.bytes;
      sum.formula = link.formula === null || sum.formula === null ? null : sum.formula + link.formula;
      byKind.set(key, sum);
    }
    const rows = [...byKind.values()].sort((a, b) => a.from - b.from || a.kind.localeCompare(b.kind));
    linkSection.append(table('Measured, by formula, and the difference, in bytes a step', ['sender', 'what', 'measured', 'formula', 'difference', 'rule'],
      rows.slice(0, 48).map((r) => [r.from, r.kind, exact(r.bytes), r.formula === null ? '–' : exact(r.formula),
        r.formula === null ? '–' : exact(r.bytes - r.formula), r.rule || ''])));
  }

  // ---- 4 memory
  const memory = section('memory');
  const memories = html('div', {class: 'columns'});
  memory.append(html('p', {}, 'What each device holds over the same step, stacked by kind, on one scale for all. Under dp device 0 gathers outputs and has the optimizer.'),
    html('div', {class: 'legend'}, ...kinds.map((kind) => html('span', {}, swatch(`fill:${kindColour[kind]}`), kind))), memories);
  const drawMemory = () => {
    memories.textContent = '';
    const total = (sample) => kinds.reduce((sum, kind) => sum + (sample.args[kind] || 0), 0);
    const top = Math.max(1, ...runs.flatMap((run) => run.memory.map(total)));
    const w = 560, h = 150, x0 = 62;
    for (const run of shown) {
      const [begin, end] = run.window(chosen.get(run));
      for (const pid of run.pids.slice(0, 8)) {
        const before = run.memory.filter((m) => m.pid === pid && m.ts <= begin).at(-1);
        const samples = run.memory.filter((m) => m.pid === pid && m.ts > begin && m.ts <= end);
        if (before) samples.unshift({...before, ts: begin});
        if (!samples.length) continue;
        const x = (us) => x0 + (us - begin) / (end - begin) * (w - x0 - 8), y = (bytes) => h - 22 - bytes / top * (h - 36);
        const picture = svg('svg', {viewBox: `0 0 ${w} ${h}`, width: '100%', style: `max-width:${w}px`, role: 'group', 'aria-label': `memory of ${run.names[pid]} under ${run.name}`});
        for (const tick of ticks(top / 2 ** 20).map((mib) => mib * 2 ** 20))
          picture.append(svg('line', {class: 'grid', x1: x0, x2: w - 8, y1: y(tick), y2: y(tick)}),
            svg('text', {class: 'soft', x: x0 - 5, y: y(tick) + 4, 'text-anchor': 'end'}, tick ? size(tick) : '0'));
        const below = samples.map(() => 0);
        for (const kind of kinds) {
          const above = samples.map((m, i) => below[i] + (m.args[kind] || 0));
          if (above.some((v, i) => v > below[i])) {
            let path = '';
            samples.forEach((m, i) => { path += `${i ? 'H' + x(m.ts).toFixed(1) + 'V' : 'M' + x(m.ts).toFixed(1) + ' '}${y(above[i]).toFixed(1)}`; });
            path += `H${x(end).toFixed(1)}V${y(below[below.length - 1]).toFixed(1)}`;
            for (let i = samples.length - 1; i > 0; --i) path += `H${x(samples[i].ts).toFixed(1)}V${y(below[i - 1]).toFixed(1)}`;
            path += `H${x(samples[0].ts).toFixed(1)}Z`;
            const peak = Math.max(...samples.map((m) => m.args[kind] || 0));
            picture.append(mark(svg('path', {d: path, style: `fill:${kindColour[kind]}`}), `${run.name}, ${run.names[pid]}: ${kind}, at most ${size(peak)} in this step`, 0, 0));
          }
          above.forEach((v, i) => { below[i] = v; });
        }
        const line = svg('line', {class: 'cursor', x1: -10, x2: -10, y1: 12, y2: h - 22});
        picture.append(svg('text', {class: 'soft', x: x0, y: h - 6}, 'step begins'), svg('text', {class: 'soft', x: w - 8, y: h - 6, 'text-anchor': 'end'}, time(end - begin)), line);
        cursors.push({run, line, x: (at) => x(begin + at)});
        follow(picture, run, x0, w - 8, end - begin);
        picture.addEventListener('pointerleave', () => moveCursors(run, null));
        const composition = (run.facts.peak || [])[run.pids.indexOf(pid)];
        const first = pid === run.pids[0] && run.metadata.policy === 'dp';
        memories.append(html('div', {}, html('h3', {}, `${run.name}: ${run.names[pid]}`), picture, composition ? html('p', {class: 'note'},
          (first ? 'It gathers the outputs and steps. ' : '') + 'At its peak ' + size(Object.values(composition).reduce((a, b) => a + b, 0)) + ': ' +
          kinds.filter((kind) => composition[kind]).map((kind) => `${kind} ${size(composition[kind])}`).join(', ') + '.') : null));
        roving(picture);
      }
    }
    if (!memories.childNodes.length) memories.append(html('p', {class: 'note'}, 'The traces tell nothing of memory.'));
  };

  // ---- 5 ring
  const ring = section('ring');
  const recorded = shown.map((run) => ({run, steps: run.spans.filter((s) => s.cat === 'ring')})).find((each) => each.steps.length);
  if (!recorded) {
    ring.append(html('p', {class: 'note'}, 'No run has recorded the steps of its collectives. Record a few: train_classifier --policy ddp --devices 3 --all-reduce ring --trace-ring --trace ring.json'));
  } else {
    const {run} = recorded;
    const call = run.spans.find((s) => s.cat === 'comm' && bucketOf(s) !== null && recorded.steps.some((r) => r.args.sequence === s.args.sequence)) ||
      run.spans.find((s) => s.cat === 'comm' && recorded.steps.some((r) => r.args.sequence === s.args.sequence));
    const steps = recorded.steps.filter((s) => s.args.sequence === call.args.sequence && s.ts >= call.ts - 1e6 && s.ts <= ends(call) + 1e6);
    const ranks = run.pids.map((pid) => pid - 1);
    // Each rank's steps in its order; a step that receives needs what the other has sent.
    const waiting = new Map(ranks.map((rank) => [rank, steps.filter((s) => s.pid - 1 === rank).sort((a, b) => a.ts - b.ts)]));
    const queues = new Map();
    const queue = (from, to) => { const key = from + '>' + to; if (!queues.has(key)) queues.set(key, []); return queues.get(key); };
    const offsets = [...new Set(steps.map((s) => s.args.offset).filter((o) => o !== undefined))].sort((a, b) => a - b);
    const state = new Map(ranks.map((rank) => [rank, new Map(offsets.map((o) => [o, {of: [rank], first: null}]))]));
    const copyOf = () => new Map([...state].map(([rank, cells]) => [rank, new Map(cells)]));
    const frames = [{text: 'Before: each rank has its own numbers.', cells: copyOf(), now: null}];
    for (let going = true; going;) {
      going = false;
      const ready = [...waiting].filter(([rank, list]) => list.length && (list[0].args.from === undefined || queue(list[0].args.from, rank).length))
        .sort((a, b) => ends(a[1][0]) - ends(b[1][0]));
      if (!ready.length) break;
      going = true;
      const [rank, list] = ready[0], step = list.shift(), {from, to, offset, first: number} = step.args;
      const cell = state.get(rank).get(offset) || {of: [rank], first: null};
      const came = from === undefined ? null : queue(from, rank).shift();
      const of = !came ? cell.of : step.name.startsWith('add') ? [...new Set([...came.of, ...cell.of])].sort((a, b) => a - b) : came.of;
      const now = {of, first: number ?? null};
      if (to !== undefined) queue(rank, to).push(now);
      if (step.name.includes('store') || (from === undefined && number !== undefined)) state.get(rank).set(offset, now);
      frames.push({now: [rank, offset], cells: copyOf(), text: `${time(ends(step) - call.ts)}: rank ${rank}: ${step.name}` +
        (from === undefined ? '' : `, from rank ${from}`) + (to === undefined ? '' : `, to rank ${to}`) + `: ${exact(step.args.count)} numbers from number ${exact(offset ?? 0)} on`});
    }
    const shownOffsets = offsets.slice(0, 16);
    let at = 0, timer = null;
    const caption = html('p', {'aria-live': 'polite'});
    const holder = html('div', {class: 'player'});
    const draw = () => {
      const frame = frames[at];
      caption.textContent = `${at} of ${frames.length - 1}. ${frame.text}`;
      holder.textContent = '';
      holder.append(scroll(html('table', {}, html('caption', {}, `${run.name}: ${call.name}${call.args.algorithm ? ', by ' + call.args.algorithm : ''}. A cell says whose numbers it is the sum of, and its first number.`),
        html('thead', {}, html('tr', {}, html('th', {scope: 'col'}, 'numbers from'), ...shownOffsets.map((o) => html('th', {scope: 'col'}, exact(o))))),
        html('tbody', {}, ...ranks.map((rank) => html('tr', {}, html('th', {scope: 'row'}, 'rank ' + rank), ...shownOffsets.map((o) => {
          const cell = frame.cells.get(rank).get(o), whole = cell.of.length === ranks.length;
          const now = frame.now && frame.now[0] === rank && frame.now[1] === o;
          return html('td', {class: (whole ? 'whole ' : '') + (now ? 'now' : ''), 'data-first': cell.first}, whole ? 'all' : cell.of.join(' + '),
            html('small', {}, cell.first === null ? ' ' : digits(cell.first, 4)));
        })))))));
    };
    const go = (to) => { at = Math.max(0, Math.min(frames.length - 1, to)); draw(); };
    const stop = () => { clearInterval(timer); timer = null; play.textContent = 'Play'; };
    const play = html('button', {class: 'tool', type: 'button', onclick: () => {
      if (timer) return stop();
      if (at === frames.length - 1) go(0);
      play.textContent = 'Stop';
      timer = setInterval(() => { go(at + 1); if (at === frames.length - 1) stop(); }, 700);
    }}, 'Play');
    const tool = (text, to) => html('button', {class: 'tool', type: 'button', onclick: () => { if (timer) stop(); go(to()); }}, text);
    ring.append(html('p', {}, 'The steps of one call as they were recorded, with the numbers that were sent. First each chunk goes around and grows; then its sum goes around.'),
      html('div', {class: 'controls', onkeydown: (event) => {
        if (event.key === 'ArrowRight') go(at + 1);
        if (event.key === 'ArrowLeft') go(at - 1);
      }}, tool('First', () => 0), tool('Back', () => at - 1), tool('Next', () => at + 1), tool('Last', () => frames.length - 1), play), caption, holder);
    if (offsets.length > shownOffsets.length) ring.append(html('p', {class: 'note'}, `The first ${shownOffsets.length} of ${offsets.length} pieces are shown.`));
    draw();
  }

  // ---- 6 gradients
  const gradients = section('gradients');
  const withGradients = shown.filter((run) => run.instants.some((i) => i.cat === 'gradient'));
  if (!withGradients.length) gradients.append(html('p', {class: 'note'}, 'No run tells when gradients are ready: those of ddp do.'));
  else gradients.append(html('p', {}, 'From the moment a gradient is ready until it is stepped: it waits for its bucket to be full, the bucket is on its way, and the optimizer steps when all are back.'));
  for (const run of withGradients) {
    const step = run.median_step ?? run.steps[0], pid = run.pids[0], [begin, end] = run.window(step, pid);
    const within = (e) => e.pid === pid && e.ts >= begin && e.ts <= end;
    const ready = run.instants.filter((i) => i.cat === 'gradient' && within(i));
    const full = new Map(run.instants.filter((i) => i.cat === 'bucket' && within(i)).map((i) => [i.args.bucket, i]));
    const sent = new Map(run.spans.filter((s) => s.cat === 'comm' && bucketOf(s) !== null && within(s)).map((s) => [s.args.bucket, s]));
    const stepped = run.spans.find((s) => s.cat === 'optimizer' && within(s));
    if (!ready.length) continue;
    let rows = ready.map((i) => ({name: i.args.parameter, bucket: i.args.bucket, from: i.ts, to: i.ts, bytes: i.args.bytes}));
    if (rows.length > 40) {
      const by = new Map();
      for (const row of rows) {
        const old = by.get(row.bucket);
        by.set(row.bucket, old ? {...old, to: row.ts ?? row.to, bytes: old.bytes + row.bytes} : {...row, name: `bucket ${row.bucket}`});
      }
      rows = [...by.values()].slice(0, 60);
    }
    const from = Math.min(...ready.map((i) => i.ts)), until = stepped ? ends(stepped) : end;
    const w = 1000, x0 = 170, h = 24 + rows.length * 16 + 8;
    const x = (us) => x0 + (us - from) / (until - from || 1) * (w - x0 - 20);
    const picture = svg('svg', {viewBox: `0 0 ${w} ${h}`, width: w, height: h, role: 'group', 'aria-label': `gradients of ${run.name}`});
    for (const tick of ticks(until - from)) picture.append(svg('line', {class: 'grid', x1: x(from + tick), x2: x(from + tick), y1: 16, y2: h - 4}),
      svg('text', {class: 'soft', x: x(from + tick), y: 11, 'text-anchor': 'middle'}, tick ? time(tick) : '0'));
    rows.forEach((row, i) => {
      const y = 28 + i * 16, tint = row.bucket === undefined ? 'var(--soft)' : buckets[row.bucket % buckets.length];
      const leaves = full.get(row.bucket), way = sent.get(row.bucket);
      const text = `${row.name}, ${size(row.bytes)}: ready after ${time(row.from - from)}` + (leaves ? `, bucket ${row.bucket} full after ${time(leaves.ts - from)}` : '') +
        (way ? `, averaged after ${time(ends(way) - from)}` : '') + (stepped ? `, stepped after ${time(stepped.ts - from)}` : '');
      const group = svg('g', {});
      if (leaves) group.append(svg('line', {x1: x(row.from), x2: x(leaves.ts), y1: y, y2: y, stroke: tint, 'stroke-dasharray': '2 3'}));
      if (way) group.append(svg('rect', {x: x(way.ts), y: y - 4, width: Math.max(1.5, x(ends(way)) - x(way.ts)), height: 8, rx: 2, style: `fill:${tint}`}));
      if (way && stepped) group.append(svg('line', {x1: x(ends(way)), x2: x(stepped.ts), y1: y, y2: y, stroke: 'var(--line)'}));
      group.append(svg('circle', {cx: x(row.from), cy: y, r: 3.6, style: `fill:${tint}`}));
      if (stepped) group.append(svg('rect', {class: 'optimizer', x: x(stepped.ts), y: y - 5, width: Math.max(2, x(ends(stepped)) - x(stepped.ts)), height: 10}));
      picture.append(svg('text', {x: x0 - 8, y: y + 4, 'text-anchor': 'end'}, row.name.length > 24 ? '…' + row.name.slice(-23) : row.name), mark(group, text, i, x(row.from)));
    });
    gradients.append(html('h3', {}, `${run.name}, ${run.names[pid]}, step ${step}`),
      html('div', {class: 'legend'}, html('span', {}, '● ready'), html('span', {}, '┄ waits for its bucket'), html('span', {}, '▬ on its way'), html('span', {}, swatch(null, 'optimizer'), 'stepped')),
      scroll(picture), behind('As a table', table('Times from the first gradient on', ['gradient', 'bucket', 'bytes', 'ready', 'bucket full', 'averaged', 'stepped'],
        rows.map((row) => [row.name, row.bucket ?? '–', exact(row.bytes), time(row.from - from), full.has(row.bucket) ? time(full.get(row.bucket).ts - from) : '–',
          sent.has(row.bucket) ? time(ends(sent.get(row.bucket)) - from) : '–', stepped ? time(stepped.ts - from) : '–']))));
    roving(picture);
  }

  // ---- 7 formulas
  const formulas = section('formulas');
  const model = shown.filter((run) => run.metadata.devices > 1).at(-1) || shown[0];
  const bytesOf = model && (model.facts.gradient_bytes || (model.metadata.notes || {}).gradient_bytes) || 1e6;
  const measured = shown.filter((run) => run.metadata.devices > 1).map((run) => {
    const [begin, end] = run.window(run.median_step ?? run.steps[0]);
    const calls = run.spans.filter((s) => s.cat === 'comm' && s.args.traffic === 'gradients' && s.pid === run.pids[0] && s.ts >= begin && s.ts <= end);
    return {run, n: run.metadata.devices, us: calls.reduce((sum, s) => sum + s.dur, 0), bytes: calls.reduce((sum, s) => sum + s.args.bytes, 0), calls: calls.length};
  }).filter((each) => each.calls && each.bytes);
  const best = measured[0];
  const values = {n: best ? best.n : 4, k: bytesOf, alpha: 5, beta: best ? Math.max(1, 2 * (best.n - 1) / best.n * best.bytes / Math.max(0.1, best.us - 2 * (best.n - 1))) : 1000};
  const outs = {};
  const formulaText = html('div', {});
  const chart = svg('svg', {viewBox: '0 0 760 250', width: '100%', style: 'max-width:760px', role: 'img', 'aria-label': 'time of an all-reduce by the number of ranks'});
  const seconds = (n, alpha, beta, k) => n < 2 ? 0 : 2 * (n - 1) * alpha + 2 * (n - 1) / n * k / beta;  // us, bytes a us
  const drawFormulas = () => {
    const {n, k, alpha, beta} = values;
    formulaText.textContent = '';
    const chunk = alpha + k / n / beta;
    formulaText.append(html('p', {class: 'formula'}, `T = 2 (N − 1) t = 2 · ${n - 1} · ${time(chunk)} = ${time(seconds(n, alpha, beta, k))}`),
      html('p', {class: 'note'}, 't is the time of one step, in which each rank sends one chunk of K / N bytes: α + K / (N β).'),
      html('p', {class: 'formula'}, `2 (N − 1) K / N = 2 · ${n - 1} · ${exact(k)} / ${n} = ${exact(2 * (n - 1) * k / n)} bytes a rank`),
      html('p', {class: 'note'}, `Less than 2 K = ${size(2 * k)}, however many ranks there are. Under dp device 0 sends (N − 1) K = ${exact((n - 1) * k)} bytes.`));
    chart.textContent = '';
    const top = 1.1 * Math.max(seconds(64, alpha, beta, k), ...measured.map((m) => m.us)), x = (m) => 70 + (m - 1) / 63 * 670, y = (us) => 220 - us / top * 200;
    for (const tick of ticks(top)) chart.append(svg('line', {class: 'grid', x1: 70, x2: 740, y1: y(tick), y2: y(tick)}), svg('text', {class: 'soft', x: 64, y: y(tick) + 4, 'text-anchor': 'end'}, tick ? time(tick) : '0'));
    for (const m of [1, 8, 16, 32, 48, 64]) chart.append(svg('text', {class: 'soft', x: x(m), y: 238, 'text-anchor': 'middle'}, m));
    chart.append(svg('text', {class: 'soft', x: 740, y: 14, 'text-anchor': 'end'}, 'ranks →'));
    let path = '';
    for (let m = 1; m <= 64; ++m) path += `${m === 1 ? 'M' : 'L'}${x(m).toFixed(1)} ${y(seconds(m, alpha, beta, k)).toFixed(1)}`;
    chart.append(svg('path', {d: path, fill: 'none', stroke: 'var(--accent)', 'stroke-width': 2}));
    chart.append(svg('circle', {cx: x(n), cy: y(seconds(n, alpha, beta, k)), r: 5, fill: 'none', stroke: 'var(--accent)', 'stroke-width': 2}, titled('the formula at the slider’s N')));
    for (const m of measured) chart.append(svg('circle', {cx: x(m.n), cy: y(m.us), r: 4.5, style: 'fill:var(--gradients)'}, titled(`${m.run.name}: ${time(m.us)} in ${m.calls} calls`)),
      svg('text', {x: x(m.n) + 9, y: y(m.us) + 4}, `${m.run.name}: ${time(m.us)}`));
  };
  const slider = (key, label, low, high, show) => {
    const out = outs[key] = html('output', {}, show(values[key]));
    const toSlider = (v) => Math.log(v / low) / Math.log(high / low) * 1000;
    const input = html('input', {type: 'range', min: 0, max: 1000, value: toSlider(Math.min(high, Math.max(low, values[key]))), 'aria-label': label, oninput: () => {
      const v = low * (high / low) ** (input.value / 1000);
      values[key] = key === 'n' ? Math.round(v) : v;
      out.textContent = show(values[key]);
      drawFormulas();
    }});
    return html('label', {}, label + ' ', input, out);
  };
  formulas.append(html('p', {}, 'Filled in from ' + (model ? model.name : 'no run') + '; β is what its gradient calls have reached, waits for late ranks included. Move the sliders to ask what would be.'),
    html('div', {class: 'controls'}, slider('n', 'N, ranks', 2, 1024, String), slider('k', 'K, bytes of gradients', 1e3, 1e10, size),
      slider('alpha', 'α, latency of a step', 0.1, 1000, time), slider('beta', 'β, bandwidth', 1, 1e6, (v) => digits(v / 1000) + ' GB/s')),
    formulaText, chart, html('p', {class: 'note'}, measured.length ? 'Filled dots are measured: the time in calls that carry gradients, in one step.' : 'No run has calls that carry gradients.'));

  drawTimelines();
  drawMemory();
  drawFormulas();
  if (data.title) document.getElementById('title').textContent = document.title = data.title;
  document.documentElement.dataset.marks = document.querySelectorAll('.mark').length;
  window.addEventListener('beforeprint', () => document.querySelectorAll('details').forEach((each) => { each.open = true; }));
})();
