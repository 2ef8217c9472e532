package inspect

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
)

// Everybody is PUBLIC, of which every role is a member.
const Everybody = "PUBLIC"

// Rights lists what a role can do to limits. The owner of the tables, its members and superusers
// are left out. Names are without the schema, in order.
type Rights struct {
	Role   string
	Writes []string // tables and sequences, with the rights to write
	Calls  []string // functions with a definition as arguments, or that write the history
	Reads  []string // tables and views with keys

	// Creates reports whether the role can create objects in the schema. A function with the name of one of
	// the library's, and arguments that fit a call better, is what callers then find, and it runs as they.
	Creates bool

	// Beyond reports whether the role can do more than a program needs: empty a table, refer to it,
	// put a trigger on it, set a sequence, change what is migrated, choose a rate, or create objects. Everything
	// that [Everybody] can do is beyond.
	Beyond bool
}

// rightsQuery reads each role's rights to each relation and function of the library in the schema
// of the table. A right of PUBLIC is listed for PUBLIC alone.
//
// $1 the table
const rightsQuery = `WITH home AS (SELECT relnamespace AS oid, relowner FROM pg_class WHERE oid = $1::regclass),
roles AS (
	SELECT oid, rolname FROM pg_roles WHERE NOT rolsuper AND rolname !~ '^pg_'
	UNION ALL SELECT 0::oid, 'public'
),
rights AS (
	SELECT r.oid, r.rolname, c.relname AS object, c.relkind::text AS kind, p AS privilege
	FROM home AS h JOIN pg_class AS c ON c.relnamespace = h.oid AND c.relname ~ '^rate_limit'
	CROSS JOIN roles AS r
	CROSS JOIN unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE', 'TRUNCATE', 'TRIGGER', 'REFERENCES', 'USAGE']) AS p
	WHERE NOT (r.oid <> 0 AND pg_has_role(r.oid, c.relowner, 'USAGE'))
		AND CASE
			WHEN c.relkind = 'S' THEN CASE WHEN p IN ('USAGE', 'UPDATE') THEN has_sequence_privilege(r.rolname, c.oid, p) END
			WHEN c.relkind NOT IN ('r', 'p', 'v') OR p = 'USAGE' THEN false
			WHEN p IN ('SELECT', 'INSERT', 'UPDATE', 'REFERENCES') THEN has_any_column_privilege(r.rolname, c.oid, p)
			ELSE has_table_privilege(r.rolname, c.oid, p)
		END
	UNION
	SELECT r.oid, r.rolname, f.proname, 'f', 'EXECUTE'
	FROM home AS h JOIN pg_proc AS f ON f.pronamespace = h.oid AND f.proname ~ '^rate_limit' AND f.prosecdef
		AND (f.proargnames && ARRAY['rate', 'requests', 'at_once', 'lease'] OR f.prorettype = 'trigger'::regtype)
	CROSS JOIN roles AS r
	WHERE NOT (r.oid <> 0 AND pg_has_role(r.oid, f.proowner, 'USAGE')) AND has_function_privilege(r.rolname, f.oid, 'EXECUTE')
	UNION
	SELECT r.oid, r.rolname, n.nspname, 'n', 'CREATE'
	FROM home AS h JOIN pg_namespace AS n ON n.oid = h.oid
	CROSS JOIN roles AS r
	WHERE NOT (r.oid <> 0 AND (pg_has_role(r.oid, h.relowner, 'USAGE') OR pg_has_role(r.oid, n.nspowner, 'USAGE'))) AND has_schema_privilege(r.rolname, n.oid, 'CREATE')
)
SELECT a.rolname::text, a.object::text, a.kind, array_agg(a.privilege ORDER BY a.privilege)
FROM rights AS a
WHERE a.oid = 0 OR has_schema_privilege(a.rolname, (SELECT oid FROM home), 'USAGE')
	AND (a.object, a.kind, a.privilege) NOT IN (SELECT e.object, e.kind, e.privilege FROM rights AS e WHERE e.oid = 0)
GROUP BY a.oid, a.rolname, a.object, a.kind
ORDER BY a.oid <> 0, a.rolname, a.object`

// Rights returns the rights of every role that can write a table or sequence of the library,
// call a function with a definition as arguments, create objects beside it, or read keys; those of [Everybody] first.
func (d *Inspector) Rights(ctx context.Context) (all []Rights, err error) {
	rows, _ := d.Pool.Query(ctx, rightsQuery, d.Table()) // its error is that of reading them
	var role, object, kind string
	var privileges []string
	_, err = pgx.ForEachRow(rows, []any{&role, &object, &kind, &privileges}, func() error {
		if role == "public" {
			role = Everybody
		}
		if len(all) == 0 || all[len(all)-1].Role != role {
			all = append(all, Rights{Role: role, Beyond: role == Everybody})
		}
		all[len(all)-1].add(object, kind, privileges)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read who has which rights: %w", err)
	}
	return slices.DeleteFunc(all, func(r Rights) bool { return !r.Creates && len(r.Writes)+len(r.Calls)+len(r.Reads) == 0 }), nil
}

// add adds rights to a relation or function.
func (r *Rights) add(object, kind string, privileges []string) {
	versions := strings.HasSuffix(object, "_version")
	switch kind {
	case "n":
		r.Creates, r.Beyond = true, true
		return
	case "f":
		r.Calls = append(r.Calls, object)
		r.Beyond = true
		return
	}
	if kind != "S" && !versions && slices.Contains(privileges, "SELECT") {
		r.Reads = append(r.Reads, object)
	}
	writes := slices.DeleteFunc(privileges, func(p string) bool { return p == "SELECT" })
	if kind == "v" || len(writes) == 0 {
		return
	}
	r.Writes = append(r.Writes, object+" ("+strings.Join(writes, ", ")+")")
	r.Beyond = r.Beyond || kind == "S" || versions || slices.ContainsFunc(writes, func(w string) bool {
		return w == "TRUNCATE" || w == "TRIGGER" || w == "REFERENCES" // a foreign key would keep Prune from deleting
	})
}

// String says in words what the role can do.
func (r Rights) String() string {
	var parts []string
	for _, part := range []struct {
		verb    string
		objects []string
	}{{"write", r.Writes}, {"call", r.Calls}, {"read keys in", r.Reads}} {
		if len(part.objects) > 0 {
			parts = append(parts, part.verb+" "+strings.Join(part.objects, ", "))
		}
	}
	if r.Creates {
		parts = append(parts, "create objects in the schema, which calls without its name may find")
	}
	return r.Role + " can " + cmp.Or(strings.Join(parts, "; "), "do nothing")
}
