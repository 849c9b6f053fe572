// DOM, number format, server access. Text from JSON enters the page through textContent only.

const SVG = 'http://www.w3.org/2000/svg';

function fill(node, props, children) {
  for (const [key, value] of Object.entries(props || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith('on')) node.addEventListener(key.slice(2), value);
    else if (key in node && !(node instanceof SVGElement) && !key.includes('-')
      && key !== 'list' && key !== 'role') node[key] = value;
    else node.setAttribute(key === 'className' ? 'class' : key, value === true ? '' : String(value));
  }
  for (const child of children.flat(9)) {
    if (child === undefined || child === null || child === false) continue;
    node.append(child instanceof Node ? child : String(child));
  }
  return node;
}

/** An HTML element: h('p', {className: 'x'}, 'text', child). */
export const h = (tag, props, ...children) => fill(document.createElement(tag), props, children);
/** An SVG element. */
export const s = (tag, props, ...children) => fill(document.createElementNS(SVG, tag), props, children);

/** Replaces the children of an element. */
export const put = (node, ...children) => { node.replaceChildren(); return fill(node, null, children); };

const embeddedNode = document.getElementById('embedded');
/** The data of a report, or null in served mode. */
export const embedded = embeddedNode ? JSON.parse(embeddedNode.textContent) : null;

const store = (name, value) => {
  try {
    if (value === undefined) return sessionStorage.getItem(name);
    sessionStorage.setItem(name, value);
  } catch { /* storage is refused: keep the value in memory only */ }
  return value;
};

const takeToken = () => {
  if (embedded) return '';
  const url = new URL(location.href);
  const given = url.searchParams.get('token');
  if (given === null) return store('nobounce-token') || '';
  store('nobounce-token', given);
  url.searchParams.delete('token');
  history.replaceState(null, '', url.pathname + url.search + url.hash);
  return given;
};
export const token = takeToken();

/** GET api/PATH with the token; throws an Error with the server's reason. */
export async function api(path, params = {}, signal = undefined) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(params)) {
    if (value !== '' && value !== undefined && value !== null) query.append(key, value);
  }
  const text = query.toString();
  let answer;
  try {
    answer = await fetch(`api/${path}${text ? `?${text}` : ''}`,
      { headers: { Authorization: `Bearer ${token}` }, cache: 'no-store', signal });
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new Error('The server does not answer. Start nobounce ui again.');
  }
  if (answer.status === 401) throw new Error('The token is missing or wrong. Open the address that nobounce ui printed.');
  const body = await answer.json().catch(() => ({ error: `HTTP status ${answer.status}` }));
  if (!answer.ok || typeof body.error === 'string') throw new Error(body.error || `HTTP status ${answer.status}`);
  return body;
}

/** Three significant digits, without an exponent where it is readable. */
export function num(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return '-';
  const size = Math.abs(value);
  if (size === 0) return '0';
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2);
  if (size >= 100) return Math.round(value).toLocaleString('en-US').replaceAll(',', '\u202f');
  return value.toPrecision(3);
}
const scaled = (value, step, units, text) => {
  let at = 0;
  while (Math.abs(value) >= step * 0.9995 && at < units.length - 1) { value /= step; at += 1; }
  return `${at ? text(value) : Math.round(value)}\u00a0${units[at]}`;
};
const threeDigits = value => value.toFixed(value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2);
/** Message and memory sizes, powers of two. */
export const size = value => scaled(value, 1024, ['B', 'KiB', 'MiB', 'GiB', 'TiB'], v => Number.isInteger(v) ? String(v) : threeDigits(v));
/** Counted bytes, powers of ten, as nobounce run prints them: rounded in integers, half up. */
export function bytes(value) {
  const n = BigInt(Math.round(value));
  let scale = 1n, unit = 'B';
  for (const next of ['kB', 'MB', 'GB', 'TB', 'PB']) {
    if (2n * n < 1999n * scale) break;
    scale *= 1000n;
    unit = next;
  }
  const rounded = parts => Number((n * parts + scale / 2n) / scale);
  const text = scale === 1n ? String(n) : rounded(100n) < 1000 ? (rounded(100n) / 100).toFixed(2) : rounded(10n) < 1000 ? (rounded(10n) / 10).toFixed(1) : String(rounded(1n));
  return `${text}\u00a0${unit}`;
}
export const rate = value => `${bytes(value)}/s`;
export const count = value => (value || 0).toLocaleString('en-US').replaceAll(',', '\u202f');
export function micros(value) {
  if (!Number.isFinite(value)) return '-';
  if (value >= 1e6) return `${num(value / 1e6)}\u00a0s`;
  if (value >= 1e4) return `${num(value / 1e3)}\u00a0ms`;
  return `${num(value)}\u00a0µs`;
}
export const millis = value => micros(value * 1e3);
export function ago(seconds) {
  const t = Math.max(0, Math.round(seconds));
  if (t < 60) return `${t} s`;
  if (t < 3600) return `${Math.floor(t / 60)} min ${t % 60} s`;
  return `${Math.floor(t / 3600)} h ${Math.floor(t % 3600 / 60)} min`;
}

/** PCIe generation and width: {speed: 32, width: 16} is "Gen5 x16". */
export function pcie(link, suffix = '') {
  if (!link || !link.speed) return null;
  const speed = link[`${suffix}speed`], width = link[`${suffix}width`];
  const gen = { 2.5: 1, 5: 2, 8: 3, 16: 4, 32: 5, 64: 6 }[speed];
  return `${gen ? `Gen${gen}` : `${speed} GT/s`} x${width}`;
}

/** A fact may be {"unread": reason}. */
export const fact = value => value && typeof value === 'object' && 'unread' in value ? undefined : value;

/** A select from [value, label] pairs. */
export function select(props, options, value) {
  const node = h('select', props, options.map(([v, label]) => h('option', { value: v }, label)));
  if (value !== undefined) node.value = value;
  return node;
}
let fields = 0;
/** A control with its label. The label names the control: an output element within it would come first otherwise. */
export function field(label, control, note) {
  control.id ||= `field-${fields += 1}`;
  return h('label', { className: 'field', htmlFor: control.id },
    h('span', { className: 'field-name' }, label), control, note && h('span', { className: 'field-note' }, note));
}

/** A button that copies a command. */
export function copyButton(text) {
  const button = h('button', { type: 'button', className: 'copy', 'aria-label': `Copy: ${text}` }, 'Copy');
  let timer;
  button.addEventListener('click', async () => {
    let done = true;
    try { await navigator.clipboard.writeText(text); } catch { done = copyBySelection(text); }
    button.textContent = done ? 'Copied' : 'Failed';
    say(done ? 'Copied' : 'Copy failed');
    clearTimeout(timer);
    timer = setTimeout(() => { button.textContent = 'Copy'; }, 1500);
  });
  return button;
}
function copyBySelection(text) {
  const area = h('textarea', { value: text, className: 'visually-hidden' });
  document.body.append(area);
  area.select();
  const done = document.execCommand('copy');
  area.remove();
  return done;
}

/** Sets a text that is announced: only where it changes, or screen readers would repeat it. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Announces a text to screen readers. */
export function say(text) {
  const node = document.getElementById('announce');
  if (node) node.textContent = text;
}

/** A command with its button. */
export const commandLine = text => h('div', { className: 'command' }, h('code', {}, text), copyButton(text));
/** A part of a fix, with what it is copied into where that is no shell. */
function fixPart({ command, assignment, option, line, remark }) {
  if (command) return commandLine(command);
  if (assignment) return commandLine(`export ${assignment}`);
  if (option) return [h('p', {}, 'Add to docker or podman run:'), commandLine(option)];
  if (line) return [h('p', {}, `Add to ${line.file}:`), commandLine(line.text)];
  return h('p', {}, remark);
}
/** The doctor's fixes: each a list of parts. */
export function fixList(fixes) {
  return h('ul', { className: 'fixes' }, fixes.map(parts => h('li', {}, parts.map(fixPart))));
}

export const PATHS = { direct: 'Direct', slow: 'Direct, but slow', staged: 'Staged', unknown: 'Unknown' };
export const DISTANCES = {
  PIX: 'below one PCIe switch', PXB: 'through several PCIe switches', PHB: 'through one host bridge',
  NODE: 'through the host bridges of one NUMA node', SYS: 'across the link between sockets',
};
export const FACTORS = {
  wire: 'network link', adapters: 'adapters and switches', 'nic-slot': 'PCIe slot of the adapter',
  'gpu-slot': 'PCIe slot of the GPU', 'pcie-read': 'round trip of PCIe reads',
  'read-window': 'outstanding PCIe reads (MaxReadReq)', sockets: 'link between sockets',
  'strict-order': 'strict ordering of PCIe writes', 'root-complex': 'processor as a PCIe switch', 'acs-redirect': 'ACS redirect',
  dram: 'host memory', 'gpu-copy': 'copies between GPU and host',
  'copy-calls': 'starting copies', software: 'calls of the library', handshake: 'rendezvous',
  'soft-nic': 'CPU core of the software NIC', 'gpu-links': 'links between the GPUs of a machine',
  seen: 'residual correction of this machine',
};
export const factor = name => FACTORS[name] || name;
