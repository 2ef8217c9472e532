package main

import (
	"net/http"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	vegeta "github.com/tsenart/vegeta/v12/lib"
)

// load is the measurement of the second process.
type load struct {
	Rate     float64 // requests a second
	P50, P99 time.Duration
	Statuses map[string]int
}

// attack sends requests as fast as the connections allow.
func attack(o options) load {
	var n atomic.Int64
	targeter := func(t *vegeta.Target) error {
		user := n.Add(1) % int64(o.keys)
		t.Method, t.URL = http.MethodPost, o.attack
		t.Header = http.Header{"X-User": {"user " + strconv.FormatInt(user, 10)}}
		return nil
	}
	attacker := vegeta.NewAttacker(
		vegeta.Workers(uint64(o.connections)), vegeta.MaxWorkers(uint64(o.connections)),
		vegeta.Connections(o.connections), vegeta.Timeout(30*time.Second))
	var m vegeta.Metrics
	for result := range attacker.Attack(targeter, vegeta.Rate{}, o.duration, "httpload") {
		m.Add(result)
	}
	m.Close()
	return load{Rate: m.Rate, P50: m.Latencies.P50, P99: m.Latencies.P99, Statuses: m.StatusCodes}
}

// median returns the load of the median rate.
func median(loads []load) load {
	sorted := slices.SortedFunc(slices.Values(loads), func(a, b load) int { return int(a.Rate - b.Rate) })
	return sorted[len(sorted)/2]
}

func (l load) total() (n int) {
	for _, count := range l.Statuses {
		n += count
	}
	return n
}

// refused returns the share of requests that were answered 429.
func (l load) refused() float64 { return float64(l.Statuses["429"]) / float64(l.total()) }
