package inspect

import (
	"context"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/traced"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// texts keeps the statements of a connection.
type texts struct {
	traced.Statements
	sent []string
}

func (s *texts) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	s.sent = append(s.sent, data.SQL)
	return ctx
}

func (s *texts) TraceBatchQuery(_ context.Context, _ *pgx.Conn, data pgx.TraceBatchQueryData) {
	s.sent = append(s.sent, data.SQL)
}

// refusedByCitus is what Citus 13.2 does not plan over a distributed table: steps of a recursive CTE,
// sub-selects by a row of an array, a list without columns, and joins with the server's own tables.
var refusedByCitus = regexp.MustCompile(`WITH RECURSIVE|LATERAL|unnest\(|SELECT FROM|rate_limits"? AS r\s+(LEFT )?JOIN`)

// All that people read of a distributed table is read by statements that Citus plans, and is the same.
func TestPortableStatements(t *testing.T) {
	t.Parallel()
	sent := &texts{}
	db := pgtest.New(t, pgtest.WithConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer, c.MaxConns = sent, 1 }))
	plain, err := pgstore.New(db.Pool, &pgstore.Config{Schema: db.Schema})
	must(t, err)
	portable, err := pgstore.New(db.Pool, &pgstore.Config{Schema: db.Schema, Portable: true})
	must(t, err)
	definitions, err := catalog.NewInMemory(nil)
	must(t, err)
	api := ratelimit.TokenBucket{Name: "api", Rate: 10, Period: time.Hour}
	for _, key := range []string{"user/1", "user/2", "user/3"} {
		must(t, plain.Take(t.Context(), api.For(key)))
	}
	read := func(store *pgstore.Store) {
		d := &Inspector{Pool: db.Pool, Schema: db.Schema, Store: store, Catalog: definitions}
		limits, err := d.Limits(t.Context())
		keys, err2 := d.PermitKeys(t.Context(), "api", ratelimit.Page{Prefix: "user/", After: "user/1", Most: 1})
		rows, err3 := d.Rows(t.Context(), "api", "user/1")
		unlike, err4 := d.Unlike(t.Context(), "api", "user/2", "bob")
		for _, err := range []error{err, err2, err3, err4} {
			if err != nil {
				t.Error(err)
			}
		}
		if len(limits) != 1 || limits[0].Rows != 3 || !slices.Equal(keys, []string{"user/2"}) || len(rows) != 1 || len(unlike) != 0 {
			t.Errorf("got %+v, %q, %+v, %+v", limits, keys, rows, unlike)
		}
	}
	read(plain)
	sent.sent = nil
	read(portable)
	looked := 0
	for _, sql := range sent.sent {
		if strings.Contains(sql, "rate_limits") {
			looked++
			if fault := refusedByCitus.FindString(sql); fault != "" {
				t.Errorf("%q in:\n%s", fault, sql)
			}
		}
	}
	if looked < 6 {
		t.Errorf("%d statements on the table, want more", looked)
	}
}
