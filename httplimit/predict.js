// How many requests a limit has left, and when the next one may go, worked out between two
// answers of the server: of the limits that a StatusHandler, or a problem with Limits, tells.
// Instants are milliseconds since 1970 on the server's clock. It never tells more than there
// is, if nobody else takes from the limit meanwhile; of sliding windows and calendars it tells less.

// What is left at an instant, with fractions.
export const valueAt = (limit, at) => {
	const { kind, rate, period, capacity, value, fullAt } = limit
	const wait = fullAt - at
	if (wait <= 0) return Math.max(value, capacity)
	if (kind === 'token bucket') return Math.max(value, capacity - (wait * rate) / period)
	if (kind === 'fixed window' && period) {
		const edges = Math.max(0, steps(limit, capacity) - Math.ceil(wait / period - 1e-9))
		return Math.min(capacity, value + edges * rate)
	}
	return value
}

// How many edges of a window it takes until there is as much.
const steps = ({ value, rate }, want) => Math.max(0, Math.ceil((want - value) / rate - 1e-9))

// How many whole requests are left at an instant.
export const remaining = (limit, at) =>
	at < limit.pausedUntil ? 0 : Math.max(0, Math.floor(valueAt(limit, at) + 1e-9 * Math.max(1, limit.capacity)))

// The instant from which on a count is granted; Infinity if that never is.
export const readyAt = (limit, count = 1) => {
	const { kind, rate, period, capacity, value, fullAt, at, pausedUntil } = limit
	const slack = 1e-9 * Math.max(1, capacity)
	if (count > capacity + slack) return Infinity
	let ready = fullAt
	if (count <= value + slack) ready = at
	else if (kind === 'token bucket') ready = fullAt - ((capacity - count) * period) / rate
	else if (kind === 'fixed window' && period) ready = fullAt - (steps(limit, capacity) - steps(limit, count)) * period
	return Math.max(at, ready, pausedUntil)
}

// Now, on the server's clock: a little before it, since the answer was under way.
export const now = (limit) => limit.offset + performance.now()

// Notes by how much its clock is ahead. For limits of a problem; load does it itself.
export const receive = (limits) => limits.map((limit) => ({ ...limit, offset: limit.at - performance.now() }))

// The limits that a path tells of.
export const load = async (path, init) => {
	const response = await fetch(path, init)
	if (!response.ok) throw new Error(`limits: ${response.status}`)
	return receive((await response.json()).limits)
}

// Calls tell({ remaining, wait }) now and whenever one of them changes, wait in seconds until
// a count is granted; returns what stops it.
export const countdown = (limit, tell, count = 1) => {
	let last = ''
	const look = () => {
		const at = now(limit)
		const state = { remaining: remaining(limit, at), wait: Math.max(0, Math.ceil((readyAt(limit, count) - at) / 1000)) }
		if (JSON.stringify(state) !== last) tell(state)
		last = JSON.stringify(state)
	}
	look()
	const timer = setInterval(look, 250)
	return () => clearInterval(timer)
}
