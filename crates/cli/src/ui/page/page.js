// Start: tabs, colour scheme, the machine to show.
import { api, embedded, h, put, select } from './util.js';
import { showMachine } from './machine.js';
import { showFindings } from './findings.js';
import { startExpect } from './expect.js';
import { startMeasured } from './measured.js';
import { startLive } from './live.js';

const tabs = [...document.querySelectorAll('[role=tab]')];
const panelOf = id => document.getElementById(`panel-${id}`);
const started = {};
let machines = [['this', 'This machine']], currentMachine = 'this', ready = null;

function openTab(id, focus) {
  const tab = tabs.find(t => t.dataset.tab === id) || tabs[0];
  for (const t of tabs) {
    const on = t === tab;
    t.setAttribute('aria-selected', on);
    t.tabIndex = on ? 0 : -1;
    panelOf(t.dataset.tab).hidden = !on;
  }
  if (focus) tab.focus();
  tab.scrollIntoView({ block: 'nearest', inline: 'nearest' });
  const name = tab.dataset.tab;
  if (location.hash.slice(1) !== name) history.replaceState(null, '', `#${name}`);
  if (!started[name]) { started[name] = true; startTab(name); }
}

async function startTab(name) {
  await ready;
  if (name === 'expect') startExpect(panelOf('expect'), machines, currentMachine);
  if (name === 'measured') startMeasured(panelOf('measured'));
}

for (const tab of tabs) {
  tab.addEventListener('click', () => openTab(tab.dataset.tab));
  tab.addEventListener('keydown', event => {
    const at = tabs.indexOf(tab);
    const to = { ArrowRight: (at + 1) % tabs.length, ArrowLeft: (at - 1 + tabs.length) % tabs.length, Home: 0, End: tabs.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    openTab(tabs[to].dataset.tab, true);
  });
}
window.addEventListener('hashchange', () => openTab(location.hash.slice(1)));

const themes = { auto: 'Colours: system', light: 'Colours: light', dark: 'Colours: dark' };
const themeButton = document.getElementById('theme');
let theme = 'auto';
try { theme = localStorage.getItem('nobounce-theme') || 'auto'; } catch { /* refused */ }
function setTheme(name) {
  theme = name in themes ? name : 'auto';
  if (theme === 'auto') delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = theme;
  themeButton.textContent = themes[theme];
  try { localStorage.setItem('nobounce-theme', theme); } catch { /* refused */ }
}
themeButton.addEventListener('click', () => setTheme({ auto: 'light', light: 'dark', dark: 'auto' }[theme]));
setTheme(theme);

function showData(data) {
  const bad = data.doctor.findings.filter(f => f.severity === 'error' || f.severity === 'warning').length;
  const badge = document.getElementById('badge-findings');
  badge.hidden = !bad;
  badge.textContent = String(bad);
  badge.setAttribute('aria-label', `${bad} errors and warnings`);
  showMachine(panelOf('machine'), data);
  showFindings(panelOf('findings'), data);
}

async function loadMachine(name) {
  const bar = document.getElementById('which');
  try {
    const data = embedded ? embedded.machine : await api('machine', { name });
    currentMachine = data.name || name;
    machines = data.machines || machines;
    if (embedded) {
      const when = embedded.created ? new Date(embedded.created * 1000).toLocaleString() : '';
      put(bar, h('span', { className: 'muted' }, ['Report', data.doctor.host, when].filter(Boolean).join(', ')));
    } else if (!bar.querySelector('select')) {
      const control = select({ id: 'machine-choice', 'aria-label': 'Machine to show' }, machines, currentMachine);
      control.addEventListener('change', () => {
        loadMachine(control.value);
        document.dispatchEvent(new CustomEvent('machine-chosen', { detail: control.value }));
      });
      put(bar, control);
    }
    showData(data);
  } catch (error) {
    for (const id of ['machine', 'findings']) put(panelOf(id), h('p', { className: 'error', role: 'alert' }, error.message));
  }
}

startLive(panelOf('live'), document.getElementById('badge-live'));
ready = loadMachine(new URLSearchParams(location.search).get('machine') || 'this');
openTab(location.hash.slice(1));
