package engine

import (
	"fmt"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
	"github.com/pgratelimit/ratelimit/pgstore/internal/known"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// The queues of rows that are not needed any more are forgotten, when there are many.
func TestRowQueuesAreForgotten(t *testing.T) {
	c := &conn.Conn{Timeout: time.Second}
	c.Open()
	e := New(c, table.New("", true, time.Second), new(known.Known), false)
	e.mu.Lock()
	defer e.mu.Unlock()
	for i := range manyRows {
		row := decide.Row{Key: decide.Key{Name: "l", Key: fmt.Sprint(i)}}
		e.queueOf(row)
		if i > 0 {
			e.rows[row].used = time.Now().Add(-2 * Contended)
		}
	}
	e.queueOf(decide.Row{Key: decide.Key{Name: "l", Key: "another"}})
	if len(e.rows) != 2 {
		t.Errorf("%d queues, want that of the first row and the new one", len(e.rows))
	}
}
